// Running operations on devices (coll/cuda/ipc_engine.hpp).
#include "coll/cuda/ipc_engine.hpp"

#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "coll/split_counts.hpp"

namespace zcomm::coll {
namespace {

constexpr std::size_t kHostSlotNbytes = 4096;
constexpr std::uint32_t kGone = 1, kStuck = 2;  // farewells, in Stage::copied_out: drained, or it never will be
constexpr double kQuiet_s = 0.5;                // after a failure, so that the caller may drop its buffers
constexpr double kDrain_s = 2.0;                // for pending work on the stream when the communicator ends
constexpr std::chrono::milliseconds kIpcFarewell{1000};  // for the others to close this rank's memory

CommOptions host_options(const CudaIpcOptions& options) {
  CommOptions host;
  host.timeout_s = options.timeout_s;
  host.limit_s = options.limit_s;
  host.warn_s = options.warn_s;
  host.slot_nbytes = kHostSlotNbytes;
  host.slot_count = 1;
  return host;
}

/// Until DeviceLiveness::detach.
std::shared_ptr<const FailureSource> not_owned(const FailureSource& failures) {
  return {std::shared_ptr<const void>(), &failures};
}

/// The message of each rank to the others at the start.
struct Hello {
  std::uint64_t slot_nbytes = 0;
  std::array<device::SharedHandle, 2> points{};
  device::SharedHandle slots;
  std::array<char, 64> uuid{};
};

}  // namespace

CudaIpcEngine::CudaIpcEngine(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<device::Device> device,
                             const CudaIpcOptions& options, SymmetricMemory& symmetric)
    : mesh_(std::move(mesh)),
      memory_(*mesh_, host_options(options)),
      liveness_(mesh_, memory_, times_of(options)),
      arrival_(memory_, liveness_),
      device_liveness_(std::make_shared<DeviceLiveness>(std::move(device), not_owned(liveness_), memory_.rank(),
                                                        liveness_.longest_s())),
      tickets_(device_liveness_) {
  try {
    set_up(options.slot_nbytes, symmetric);
  } catch (const std::exception& error) {
    liveness_.fail(text("init of backend cuda_ipc: ", error.what()));
    throw;
  }
}

void CudaIpcEngine::set_up(std::size_t slot_nbytes, SymmetricMemory& symmetric) {
  Signature signature;
  set_name(signature, "init of backend cuda_ipc", "");
  seal(signature);
  if (static_cast<std::size_t>(world_size()) > device::kMaxKernelBuffers)
    throw Unsupported(text("backend cuda_ipc: ", world_size(), " ranks on one host; at most ",
                           device::kMaxKernelBuffers, ": use nccl"));
  device::Device& device = device_liveness_->device();
  rounds_ = std::make_unique<DeviceRounds>(device, memory_, liveness_);
  slots_ = std::make_unique<DeviceSlots>(device, memory_, slot_nbytes);
  heap_ = std::make_unique<DeviceHeap>(device_liveness_, memory_, *rounds_, symmetric);
  arrival_.enter(signature);
  int remote = 0;
  if (world_size() > 1) {
    Hello mine{slots_->slot_nbytes(), rounds_->handles(), slots_->handle()};
    device.uuid().copy(mine.uuid.data(), mine.uuid.size());
    static_assert(sizeof(mine) <= kHostSlotNbytes);
    rounds_->all_gather_on_host(&mine, sizeof(mine));
    for (int r = 0; r < world_size(); ++r) {
      Hello theirs;
      std::memcpy(&theirs, rounds_->gathered(r), sizeof(theirs));
      if (theirs.slot_nbytes != mine.slot_nbytes)
        throw CollectiveMismatch(text("communicator options differ: rank ", rank(), ": device slots of ",
                                      mine.slot_nbytes, " bytes; rank ", r, ": ", theirs.slot_nbytes));
      if (r == rank()) continue;
      remote += theirs.uuid != mine.uuid;
      rounds_->open(r, theirs.points);
      slots_->open(r, theirs.slots);
    }
    rounds_->barrier_on_host();
  }
  direct_ = std::make_unique<DeviceDirect>(memory_, *rounds_, remote);
  staged_ = std::make_unique<DeviceStaged>(memory_, *rounds_, *slots_, remote);
}

void CudaIpcEngine::prepare(Operation& operation, const Call& call) noexcept { tickets_.prepare(operation, call); }

void CudaIpcEngine::run(Operation& operation) {
  try {
    if (moves_data(operation.signature.kind) || operation.signature.kind == OpKind::barrier) {
      const auto ticket = tickets_.of(operation);
      start(operation, *ticket);
      work(operation);
      rounds_->stream().record(ticket->end());
      in_flight_[next_] = ticket;
      next_ = (next_ + 1) % kInFlight;
      if (!operation.async) ticket->order(std::nullopt);
    } else {
      arrival_.enter(operation.signature);
      if (operation.signature.kind != OpKind::duplicate) heap_->make(operation);
    }
  } catch (const CollectiveMismatch&) {
    failed_ = true;
    throw;  // the other ranks detect it themselves
  } catch (const Interrupted&) {
    failed_ = true;
    liveness_.leave();
    drain(kQuiet_s);
    throw;
  } catch (const std::exception& error) {
    failed_ = true;
    liveness_.fail(text(describe(operation.signature), ": ", error.what()));
    drain(kQuiet_s);
    throw;
  }
}

/// Waits until all ranks have entered, and orders the stream after all that they had queued on theirs.
void CudaIpcEngine::start(Operation& operation, Ticket& ticket) {
  if (const auto& oldest = in_flight_[next_]) device_liveness_->wait(oldest->end(), oldest->signature);
  rounds_->stream().wait(ticket.ready());
  rounds_->mark();
  arrival_.enter(operation.signature);
  rounds_->follow();
  ticket.signature = operation.signature;
}

void CudaIpcEngine::work(const Operation& operation) {
  const Signature& signature = operation.signature;
  const SignatureOf signature_of = [this](int rank) -> const Signature& { return arrival_.signature(rank); };
  switch (signature.kind) {
    case OpKind::barrier:
      return;
    case OpKind::all_to_all:
      compare_splits(operation, signature_of);
      return staged_->exchange(operation, signature_of);
    case OpKind::gather:
    case OpKind::scatter:
      return staged_->run(operation);
    default:
      break;
  }
  const Path path =
      choose_path(signature.kind, world_size(), [this](int rank) -> const Entry& { return arrival_.entry(rank); });
  if (path == Path::staged) return staged_->run(operation);
  direct_->run(operation, path);
  rounds_->barrier();
}

void CudaIpcEngine::compare_splits(const Operation& operation, const SignatureOf& signature_of) {
  if (splits_match(world_size(), signature_of)) return;
  const SplitCounts own = split_counts(operation.items.all());
  rounds_->all_gather_on_host(own.data(), own.size() * sizeof(own[0]));
  std::vector<SplitCounts> by_rank(static_cast<std::size_t>(world_size()), own);
  for (int q = 0; q < world_size(); ++q)
    std::memcpy(by_rank[static_cast<std::size_t>(q)].data(), rounds_->gathered(q), own.size() * sizeof(own[0]));
  throw_split_mismatch(signature_of(0), by_rank);
}

Messenger& CudaIpcEngine::messenger() {
  throw Unsupported("send, recv: not on backend cuda_ipc; use a collective, or send a copy on the CPU");
}

void CudaIpcEngine::close() noexcept {
  device_liveness_->close();
  liveness_.close();
}

void CudaIpcEngine::suspend_deadline(bool suspended) {
  device_liveness_->suspend_deadline(suspended);
  liveness_.suspend_deadline(suspended);
}

CudaIpcEngine::~CudaIpcEngine() {
  device_liveness_->detach();
  const bool drained = drain(kDrain_s);
  rounds_->drop_stream();
  if (drained) {
    slots_->close_peers();
    rounds_->close_peers();
    heap_->close_peers();
  }
  publish(memory_.own()[Stage::copied_out], drained ? kGone : kStuck);
  const bool alone = drained && wait_for_farewells();
  if (alone || (drained && !failed_)) return;
  // [Note: the end]: kept, and reachable, until the process ends.
  struct Left {
    std::unique_ptr<DeviceRounds> rounds;
    std::unique_ptr<DeviceSlots> slots;
    std::array<std::shared_ptr<Ticket>, kInFlight> tickets;
  };
  static std::mutex mutex;
  static auto* const left = new std::vector<Left>;
  heap_->abandon();
  const std::lock_guard lock(mutex);
  left->push_back({std::move(rounds_), std::move(slots_), std::move(in_flight_)});
}

/// Whether the device has finished all work of this rank.
bool CudaIpcEngine::drain(double patience_s) noexcept {
  try {
    const auto end = device_liveness_->device().make_event();
    rounds_->stream().record(*end);
    return end->wait_for(patience_s);
  } catch (...) {
    return false;  // the device is lost
  }
}

/// Whether no other rank has this rank's memory open any more, or will use it.
bool CudaIpcEngine::wait_for_farewells() noexcept {
  const auto until = Clock::now() + kIpcFarewell;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    Counter& counter = memory_.block(peer)[Stage::copied_out];
    while (!wait_asleep(counter, kGone, std::min(until, Clock::now() + std::chrono::milliseconds(20)))) {
      const net::Fate fate = mesh_->fate(peer);
      if (fate == net::Fate::died || (fate == net::Fate::left && reached(counter.value.load(), kGone))) break;
      if (Clock::now() >= until) return false;
    }
    if (counter.value.load() == kStuck) return false;
  }
  return true;
}

std::unique_ptr<Communicator> make_cuda_ipc_communicator(std::shared_ptr<net::Mesh> mesh,
                                                         std::shared_ptr<device::Device> device,
                                                         const CudaIpcOptions& options) {
  if (!mesh) throw InvalidArgument("make_cuda_ipc_communicator: no mesh");
  if (!device) throw InvalidArgument("make_cuda_ipc_communicator: no device");
  return make_communicator([mesh = std::move(mesh), device = std::move(device), options](SymmetricMemory& memory) {
    return std::make_unique<CudaIpcEngine>(mesh, device, options, memory);
  });
}

}  // namespace zcomm::coll
