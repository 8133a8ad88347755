// NCCL's functions (fake_nccl.hpp).
#include "coll/support/fake_nccl.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <tuple>
#include <utility>

#include "coll/support/nccl_device.hpp"

namespace zcomm::coll {

/// The target of ncclComm_t.
struct NcclCommHandle {
  int rank;  // of the device: of the job
  int ranks;
  std::shared_ptr<test::Rendezvous> world;
  const test::NcclDevice* device;
  int place;          // in this communicator
  bool busy = false;  // a call is in progress, for that many queries
  int queries = 0;
  bool finalizing = false, splitting = false;
  const char* ended = nullptr;            // by which call
  std::vector<test::FakeTask> pending{};  // launched when the call ends
  device::Stream* stream = nullptr;
  test::FakeNccl::CallCounts call_counts{};
};

}  // namespace zcomm::coll

namespace zcomm::test {
namespace {

FakeNccl*& fake() {
  static FakeNccl* current = nullptr;
  return current;
}

/// The calling thread's calls between ncclGroupStart and ncclGroupEnd.
struct Group {
  int depth = 0;
  coll::NcclCommHandle* comm = nullptr;
  void* stream = nullptr;
  std::vector<FakeTask> tasks;
  int error = FakeNccl::success;
};

Group& group() {
  static thread_local Group open;
  return open;
}

}  // namespace

FakeNccl::FakeNccl() {
  if (fake() != nullptr) complain("two at a time");
  fake() = this;
}

FakeNccl::~FakeNccl() {
  for (const auto& comm : comms_)
    if (comm->ended == nullptr) complain("rank " + std::to_string(comm->rank) + " leaves a communicator behind");
  if (open_groups_ != 0) complain(std::to_string(open_groups_) + " groups are left open");
  fake() = nullptr;
}

void FakeNccl::be_slow(int queries) {
  const std::lock_guard lock(mutex_);
  queries_ = queries;
}
void FakeNccl::fail(int rank, const std::string& call, int result) {
  const std::lock_guard lock(mutex_);
  orders_[rank].failures[call] = result;
}
void FakeNccl::break_down(int rank, int result) {
  const std::lock_guard lock(mutex_);
  orders_[rank].state = result;
}
void FakeNccl::hold_kernels(int rank) {
  const std::lock_guard lock(mutex_);
  orders_[rank].holds_kernels = true;
}
void FakeNccl::let_calls_differ() {
  const std::lock_guard lock(mutex_);
  may_differ_ = true;
  for (const auto& [number, world] : worlds_) world->let_calls_differ();
}
void FakeNccl::hold_finalize(int rank) {
  const std::lock_guard lock(mutex_);
  orders_[rank].holds_finalize = true;
}
void FakeNccl::delay_init(int rank, double seconds) {
  const std::lock_guard lock(mutex_);
  orders_[rank].init_delay_s = seconds;
}

FakeNccl::Comm& FakeNccl::comm_of(int rank) {
  const auto latest =
      std::find_if(comms_.rbegin(), comms_.rend(), [rank](const auto& comm) { return comm->rank == rank; });
  if (latest == comms_.rend()) throw Error("FakeNccl: no communicator of rank " + std::to_string(rank));
  return **latest;
}

void FakeNccl::wait_for_kernel(int rank) {
  std::shared_ptr<Rendezvous> world;
  int place = 0;
  {
    const std::lock_guard lock(mutex_);
    world = comm_of(rank).world, place = comm_of(rank).place;
  }
  world->wait_for_kernel(place);
}

FakeNccl::CallCounts FakeNccl::call_counts(int rank) {
  const std::lock_guard lock(mutex_);
  return comm_of(rank).call_counts;
}

int FakeNccl::ordered(const char* call, int rank) {
  auto& failures = orders_[rank].failures;
  const auto found = failures.find(call);
  if (found == failures.end()) return success;
  const int result = found->second;
  failures.erase(found);
  return result;
}

bool FakeNccl::allows(const char* call, const Comm& comm) const {
  const std::string caller = call + (" of rank " + std::to_string(comm.rank));
  if (comm.ended != nullptr)
    complain(caller + " after " + comm.ended);
  else if (NcclDevice::current() != comm.device)
    complain(caller + ": the thread's device is another one");
  else
    return true;
  return false;
}

// ---- states ----

int FakeNccl::begin(Comm& comm) {
  comm.busy = true;
  comm.queries = queries_;
  return state_of(comm);
}

/// Ends a call that has been in progress for long enough.
int FakeNccl::state_of(Comm& comm) {
  const Orders& orders = orders_[comm.rank];
  if (orders.state != success) return orders.state;
  if (!comm.busy) return success;
  const auto joined =
      std::count_if(comms_.begin(), comms_.end(), [&](const auto& c) { return c->world == comm.world; });
  if (comm.queries > 0 || comm.splitting || joined < comm.ranks || (comm.finalizing && orders.holds_finalize))
    return in_progress;
  comm.busy = false;
  return launch(comm);
}

int FakeNccl::launch(Comm& comm) {
  if (comm.pending.empty()) return success;
  try {
    put(*comm.stream, [world = comm.world, rank = comm.place, tasks = std::exchange(comm.pending, {}),
                       held = orders_[comm.rank].holds_kernels] { world->run(rank, tasks, held); });
  } catch (const Error&) {  // the device is lost
    orders_[comm.rank].state = cuda_error;
  }
  return orders_[comm.rank].state;
}

int FakeNccl::query(Comm& comm, int& state) {
  const std::lock_guard lock(mutex_);
  if (comm.ended != nullptr) {
    complain("ncclCommGetAsyncError of rank " + std::to_string(comm.rank) + " after " + comm.ended);
    return invalid_argument;
  }
  if (const int result = ordered("ncclCommGetAsyncError", comm.rank); result != success) return result;
  state = state_of(comm);
  if (comm.queries > 0) --comm.queries;
  return success;
}

// ---- the life of a communicator ----

int FakeNccl::name_world(std::uint64_t& number) {
  const std::lock_guard lock(mutex_);
  number = ++last_world_;
  return ordered("ncclGetUniqueId", 0);
}

int FakeNccl::init(Comm** made, int ranks, std::uint64_t world, int place) {
  std::unique_lock lock(mutex_);
  const NcclDevice* const device = NcclDevice::current();
  if (device == nullptr) {
    complain("ncclCommInitRankConfig: the thread has no device");
    return invalid_usage;
  }
  if (const double delay_s = orders_[device->rank()].init_delay_s; delay_s > 0) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::duration<double>(delay_s));
    lock.lock();
  }
  if (const int result = ordered("ncclCommInitRankConfig", device->rank()); result != success) return result;
  auto& rendezvous = worlds_[world];
  if (!rendezvous) rendezvous = std::make_shared<Rendezvous>(ranks);
  if (may_differ_) rendezvous->let_calls_differ();
  comms_.push_back(std::make_unique<Comm>(Comm{device->rank(), ranks, rendezvous, device, place}));
  *made = comms_.back().get();
  ++(*made)->call_counts.inits;
  ++inits_;
  return begin(**made);
}

int FakeNccl::split(Comm& parent, int color, int key, Comm** made) {
  const std::lock_guard lock(mutex_);
  if (!allows("ncclCommSplit", parent)) return invalid_argument;
  if (parent.busy || parent.finalizing || parent.world->is_running(parent.place))
    complain("ncclCommSplit: something is in progress");
  if (color < -1) complain("ncclCommSplit: a color below NCCL_SPLIT_NOCOLOR");
  if (const int result = ordered("ncclCommSplit", parent.rank); result != success) return result;
  auto& calls = splits_[parent.world.get()];
  calls.push_back({&parent, color, key, made});
  parent.splitting = true;
  if (static_cast<int>(calls.size()) == parent.ranks) part(parent.world.get());
  return begin(parent);
}

/// Makes the communicators of the parts, as NCCL's own threads do.
void FakeNccl::part(const Rendezvous* world) {
  auto calls = std::exchange(splits_[world], {});
  std::sort(calls.begin(), calls.end(), [](const Splitting& a, const Splitting& b) {
    return std::tuple(a.color, a.key, a.parent->place) < std::tuple(b.color, b.key, b.parent->place);
  });
  for (auto first = calls.begin(); first != calls.end();) {
    const auto last = std::find_if(first, calls.end(), [&](const Splitting& c) { return c.color != first->color; });
    const int ranks = static_cast<int>(last - first);
    const auto meeting = std::make_shared<Rendezvous>(ranks);
    if (may_differ_) meeting->let_calls_differ();
    for (int place = 0; first != last; ++first, ++place) {
      first->parent->splitting = false;
      if (first->color < 0) continue;
      comms_.push_back(std::make_unique<Comm>(
          Comm{first->parent->rank, ranks, meeting, first->parent->device, place, true, queries_}));
      *first->made = comms_.back().get();
      ++parts_;
    }
  }
}

std::pair<int, int> FakeNccl::made() const {
  const std::lock_guard lock(mutex_);
  return {inits_, parts_};
}

int FakeNccl::finalize(Comm& comm) {
  const std::lock_guard lock(mutex_);
  if (!allows("ncclCommFinalize", comm)) return invalid_argument;
  if (comm.busy || comm.world->is_running(comm.place)) complain("ncclCommFinalize: something is in progress");
  if (const int result = ordered("ncclCommFinalize", comm.rank); result != success) return result;
  ++comm.call_counts.finalized;
  comm.finalizing = true;
  return begin(comm);
}

int FakeNccl::destroy(Comm& comm) {
  const std::lock_guard lock(mutex_);
  if (!allows("ncclCommDestroy", comm)) return invalid_argument;
  if (!comm.finalizing || comm.busy) complain("ncclCommDestroy: ncclCommFinalize has not ended");
  comm.ended = "ncclCommDestroy";
  ++comm.call_counts.destroyed;
  return success;
}

int FakeNccl::abort(Comm& comm) {
  {
    const std::lock_guard lock(mutex_);
    if (!allows("ncclCommAbort", comm)) return invalid_argument;
    if (group().depth != 0) complain("ncclCommAbort within a group");
    comm.ended = "ncclCommAbort";
    ++comm.call_counts.aborted;
  }
  comm.world->abort(comm.place);
  return success;
}

// ---- groups ----

int FakeNccl::start_group() {
  const std::lock_guard lock(mutex_);
  const NcclDevice* const device = NcclDevice::current();
  if (device == nullptr) complain("ncclGroupStart: the thread has no device");
  if (const int result = device == nullptr ? invalid_usage : ordered("ncclGroupStart", device->rank());
      result != success)
    return result;
  ++group().depth;
  ++open_groups_;
  return success;
}

int FakeNccl::add(const char* call, Comm& comm, const FakeTask& task, void* stream) {
  const std::lock_guard lock(mutex_);
  Group& open = group();
  if (!allows(call, comm)) return invalid_argument;
  if (open.depth == 0) complain(std::string(call) + " outside of a group, where a list would not be one operation");
  if (comm.busy || comm.finalizing) complain(std::string(call) + " while something is in progress");
  if (open.comm != nullptr && (open.comm != &comm || open.stream != stream)) complain("a group of several streams");
  if (task.other >= comm.ranks) complain(std::string(call) + ": no such rank");
  open.comm = &comm;
  open.stream = stream;
  if (const int result = ordered(call, comm.rank); result != success) return open.error = result;
  open.tasks.push_back(task);
  return success;
}

int FakeNccl::end_group() {
  const std::lock_guard lock(mutex_);
  if (group().depth == 0) {
    complain("ncclGroupEnd without ncclGroupStart");
    return invalid_usage;
  }
  --open_groups_;
  if (--group().depth > 0) return success;
  Group done = std::exchange(group(), {});
  if (done.comm == nullptr) return success;
  Comm& comm = *done.comm;
  if (!allows("ncclGroupEnd", comm)) return invalid_argument;
  ++comm.call_counts.groups;
  if (done.error == success) done.error = ordered("ncclGroupEnd", comm.rank);
  if (done.error != success) return done.error;
  comm.pending = std::move(done.tasks);
  comm.stream = static_cast<device::Stream*>(done.stream);
  return begin(comm);
}

// ---- the functions themselves ----

struct NcclCalls {
  using Comm = coll::NcclLibrary::Comm;

  static int get_unique_id(coll::NcclId* id) {
    std::uint64_t number = 0;
    const int result = fake()->name_world(number);
    std::memcpy(id->bytes.data(), &number, sizeof(number));
    return result;
  }
  static int init(Comm* comm, int ranks, coll::NcclId id, int rank, coll::NcclConfig* config) {
    // As the header of 2.14 lays it out, and initializes it.
    if (config->size != 24 || config->magic != 0xcafebeef || config->version != 21400 || config->blocking != 0)
      complain("ncclConfig_t is not that of a non-blocking communicator of 2.14");
    std::uint64_t number = 0;
    std::memcpy(&number, id.bytes.data(), sizeof(number));
    return fake()->init(comm, ranks, number, rank);
  }
  static int split(Comm comm, int color, int key, Comm* made, coll::NcclConfig* config) {
    if (config != nullptr) complain("ncclCommSplit: a part is non-blocking if its parent is, without a config");
    return fake()->split(*comm, color, key, made);
  }
  static int query(Comm comm, int* state) { return fake()->query(*comm, *state); }
  static int finalize(Comm comm) { return fake()->finalize(*comm); }
  static int destroy(Comm comm) { return fake()->destroy(*comm); }
  static int abort(Comm comm) { return fake()->abort(*comm); }
  static int start_group() { return fake()->start_group(); }
  static int end_group() { return fake()->end_group(); }

  static int all_reduce(const void* in, void* out, std::size_t count, int dtype, int op, Comm comm, void* stream) {
    return fake()->add("ncclAllReduce", *comm, {FakeKind::all_reduce, in, out, count, dtype, op}, stream);
  }
  static int reduce(const void* in, void* out, std::size_t count, int dtype, int op, int root, Comm comm,
                    void* stream) {
    return fake()->add("ncclReduce", *comm, {FakeKind::reduce, in, out, count, dtype, op, root}, stream);
  }
  static int reduce_scatter(const void* in, void* out, std::size_t count, int dtype, int op, Comm comm, void* stream) {
    return fake()->add("ncclReduceScatter", *comm, {FakeKind::reduce_scatter, in, out, count, dtype, op}, stream);
  }
  static int all_gather(const void* in, void* out, std::size_t count, int dtype, Comm comm, void* stream) {
    return fake()->add("ncclAllGather", *comm, {FakeKind::all_gather, in, out, count, dtype}, stream);
  }
  static int broadcast(const void* in, void* out, std::size_t count, int dtype, int root, Comm comm, void* stream) {
    return fake()->add("ncclBroadcast", *comm, {FakeKind::broadcast, in, out, count, dtype, 0, root}, stream);
  }
  static int send(const void* in, std::size_t count, int dtype, int peer, Comm comm, void* stream) {
    return fake()->add("ncclSend", *comm, {FakeKind::send, in, nullptr, count, dtype, 0, peer}, stream);
  }
  static int recv(void* out, std::size_t count, int dtype, int peer, Comm comm, void* stream) {
    return fake()->add("ncclRecv", *comm, {FakeKind::recv, nullptr, out, count, dtype, 0, peer}, stream);
  }
  static const char* error_string(int result) {
    static constexpr const char* words[] = {"no error",
                                            "unhandled cuda error",
                                            "unhandled system error",
                                            "internal error",
                                            "invalid argument",
                                            "invalid usage",
                                            "remote process exited or there was a network error"};
    return result >= 0 && result < 7 ? words[result] : "unknown result code";
  }
};

const coll::NcclLibrary& FakeNccl::library(bool has_split) {
  static const coll::NcclLibrary functions{
      .get_version = [](int* version) { return *version = 22703, 0; },
      .get_unique_id = NcclCalls::get_unique_id,
      .comm_init_rank_config = NcclCalls::init,
      .comm_split = NcclCalls::split,
      .comm_abort = NcclCalls::abort,
      .comm_finalize = NcclCalls::finalize,
      .comm_destroy = NcclCalls::destroy,
      .comm_get_async_error = NcclCalls::query,
      .get_error_string = NcclCalls::error_string,
      .get_last_error = [](coll::NcclLibrary::Comm) { return "last words"; },
      .all_reduce = NcclCalls::all_reduce,
      .reduce = NcclCalls::reduce,
      .reduce_scatter = NcclCalls::reduce_scatter,
      .all_gather = NcclCalls::all_gather,
      .broadcast = NcclCalls::broadcast,
      .send = NcclCalls::send,
      .recv = NcclCalls::recv,
      .group_start = NcclCalls::start_group,
      .group_end = NcclCalls::end_group,
  };
  static const coll::NcclLibrary older = [] {
    coll::NcclLibrary all = functions;
    all.comm_split = nullptr;
    return all;
  }();
  return has_split ? functions : older;
}

}  // namespace zcomm::test
