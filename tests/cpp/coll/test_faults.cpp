// A rank that dies or stops at any step of any operation: the others report it, and none hangs.
//
// Every step that others can see is a fault point (base/fault.hpp): each operation is run again with the victim killed
// at its first point, its second, ... until it survives.
#include <sys/mman.h>

#include <csignal>

#include "base/fault.hpp"
#include "coll/support/process_world.hpp"

namespace faults_test {

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr int kWorld = 3, kVictim = 1;
constexpr double kSoon_s = 5;  // far less than the deadline: a wait that ends by then was ended by a notice

struct Operation {
  const char* name;
  bool symmetric;
  std::size_t part;  // elements
  void (*call)(Communicator& comm, float* data, std::size_t part);
};

void all_reduce(Communicator& comm, float* data, std::size_t part) {
  const Buffer all{data, part * kWorld};
  comm.all_reduce({&all, 1}, DType::float32, ReduceOp::sum, kBlocking);
}
void reduce(Communicator& comm, float* data, std::size_t part) {
  const Buffer all{data, part * kWorld};
  comm.reduce({&all, 1}, DType::float32, ReduceOp::sum, 2, kBlocking);
}
void reduce_scatter(Communicator& comm, float* data, std::size_t part) {
  const ConstBuffer all{data, part * kWorld};
  std::vector<float> shard(part);
  const Buffer out{shard.data(), part};
  comm.reduce_scatter({&all, 1}, {&out, 1}, DType::float32, ReduceOp::sum, DType::float32, false, kBlocking);
}
void all_gather(Communicator& comm, float* data, std::size_t part) {
  const Buffer all{data, part * kWorld};
  const ConstBuffer own{data + part * static_cast<std::size_t>(comm.rank()), part};
  comm.all_gather({&own, 1}, {&all, 1}, DType::float32, kBlocking);
}
void broadcast(Communicator& comm, float* data, std::size_t part) {
  const Buffer all{data, part * kWorld};
  comm.broadcast({&all, 1}, DType::float32, kVictim, kBlocking);
}
void gather(Communicator& comm, float* data, std::size_t part) {
  std::vector<float> mine(part);
  const ConstBuffer own{mine.data(), part};
  const Buffer all{data, part * kWorld};
  comm.gather({&own, 1}, {&all, comm.rank() == 2 ? 1u : 0u}, DType::float32, 2, kBlocking);
}
void scatter(Communicator& comm, float* data, std::size_t part) {
  std::vector<float> mine(part);
  const Buffer own{mine.data(), part};
  const ConstBuffer all{data, part * kWorld};
  comm.scatter({&all, comm.rank() == kVictim ? 1u : 0u}, {&own, 1}, DType::float32, kVictim, kBlocking);
}
void all_to_all(Communicator& comm, float* data, std::size_t part) {
  std::vector<float> received(part * kWorld);
  std::vector<ConstBuffer> in;
  std::vector<Buffer> out;
  for (std::size_t q = 0; q < kWorld; ++q) {
    in.push_back({data + q * part, part});
    out.push_back({received.data() + q * part, part});
  }
  comm.all_to_all(in, out, DType::float32, kBlocking);
}
void send_around(Communicator& comm, float* data, std::size_t part) {
  std::vector<float> received(part);
  const ConstBuffer out{data, part};
  const Buffer in{received.data(), part};
  Work sent = comm.send({&out, 1}, DType::float32, (comm.rank() + 1) % kWorld, 0);
  comm.recv({&in, 1}, DType::float32, (comm.rank() + kWorld - 1) % kWorld, 0, kBlocking);
  sent.wait();
}
void encoded_all_reduce(Communicator& comm, float* data, std::size_t part) {
  const Buffer all{data, part * kWorld};
  const Coding coding{};
  comm.all_reduce({&all, 1}, DType::float32, ReduceOp::sum, kBlocking, &coding);
}
void encoded_reduce_scatter(Communicator& comm, float* data, std::size_t part) {
  const ConstBuffer all{data, part * kWorld};
  std::vector<float> shard(part);
  const Buffer out{shard.data(), part};
  const Coding coding{};
  comm.reduce_scatter({&all, 1}, {&out, 1}, DType::float32, ReduceOp::sum, DType::float32, false, kBlocking, {},
                      &coding);
}
void barrier(Communicator& comm, float*, std::size_t) { comm.barrier(kBlocking); }

std::vector<Operation> operations() {
  std::vector<Operation> all = {
      {"barrier", false, 0, barrier}, {"send", false, 20, send_around}, {"send", false, 9000, send_around}};
  const std::pair<const char*, void (*)(Communicator&, float*, std::size_t)> calls[] = {
      {"all_reduce", all_reduce}, {"reduce", reduce},        {"reduce_scatter", reduce_scatter},
      {"all_gather", all_gather}, {"broadcast", broadcast},  {"gather", gather},
      {"scatter", scatter},       {"all_to_all", all_to_all}};
  all.push_back({"all_reduce int8", false, 20, encoded_all_reduce});
  all.push_back({"reduce_scatter int8", false, 4000, encoded_reduce_scatter});
  for (const auto& [name, call] : calls) {
    all.push_back({name, false, 20, call});   // one shot
    all.push_back({name, false, 900, call});  // a few steps through slots
    all.push_back({name, true, 900, call});
  }
  return all;
}

/// The expected outcome on the other ranks: the loss of the victim, soon, and again at each later call; or success, if
/// the victim had done its part.
bool is_noticed(Rank& self, const Operation& test, float* data) {
  const auto begin = std::chrono::steady_clock::now();
  bool is_lost = false;
  for (int call = 0; call < 4 && !is_lost; ++call) {
    try {
      test.call(*self.comm, data, test.part);
    } catch (const PeerLost& lost) {
      // A rank that exchanges messages with the other survivor finds that it has left, if that knew of the victim
      // earlier.
      is_lost = lost.rank == kVictim || (test.call == send_around && lost.rank == 2 - self.rank);
      if (!is_lost) std::cerr << "rank " << self.rank << ": " << lost.what() << std::endl;
    }
  }
  bool is_poisoned = false;
  try {
    self.comm->barrier(kBlocking);
  } catch (const PeerLost&) {
    is_poisoned = true;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return is_lost && is_poisoned && took.count() < kSoon_s;
}

using RunWorld = std::function<std::vector<int>(const std::function<bool(Rank&)>&)>;

/// Over sockets a rank may be in this barrier yet when the victim, which has left it, is killed: then it knows already.
void all_begin(Rank& self) {
  try {
    self.comm->barrier(kBlocking);
  } catch (const PeerLost& lost) {
    if (self.rank == kVictim || lost.rank != kVictim) throw;
  }
}

/// Whether the victim died.
bool kill_at(const RunWorld& run, const Operation& test, int point) {
  const auto codes = run([&](Rank& self) {
    Memory memory = Memory::make(*self.comm, test.part * kWorld * sizeof(float), test.symmetric);
    auto* data = reinterpret_cast<float*>(memory.data());
    all_begin(self);
    if (self.rank == kVictim) {
      arm_fault(point, [] { ::kill(::getpid(), SIGKILL); });
      test.call(*self.comm, data, test.part);
      arm_fault(0, nullptr);
      ::_exit(9);  // all points are passed; without a goodbye, so that the others end as well
    }
    return is_noticed(self, test, data);
  });
  for (int r = 0; r < kWorld; ++r)
    if (r != kVictim && codes[static_cast<std::size_t>(r)] != 0)
      fail(__FILE__, __LINE__,
           std::string(test.name) + (test.symmetric ? " symmetric" : "") + " point " + std::to_string(point) +
               ": rank " + std::to_string(r) + " ended with " + std::to_string(codes[static_cast<std::size_t>(r)]));
  EXPECT_TRUE(codes[kVictim] == -SIGKILL || codes[kVictim] == 9);
  return codes[kVictim] == -SIGKILL;
}

/// Under a sanitizer at every seventh step, with another offset for each operation.
void kill_at_each_step(const RunWorld& run, const std::vector<Operation>& tests) {
  constexpr int kStride = kSanitized ? 7 : 1;
  int first = 0;
  for (const Operation& test : tests) {
    int point = 1 + first++ % kStride, killed = 0;
    for (; kill_at(run, test, point); point += kStride) ++killed;
    if (killed == 0 && point == 1) fail(__FILE__, __LINE__, std::string(test.name) + ": has no step");
  }
}

}  // namespace

TEST(comm_faults, killed_at_each_step_of_each_operation) {
  const RunWorld run = [](const auto& body) { return run_processes(kWorld, small_slots(60, 4096), body); };
  kill_at_each_step(run, operations());
}

TEST(comm_faults, killed_at_each_step_over_sockets) {
  const RunWorld run = [](const auto& body) { return run_link_processes(kWorld, {{60, 8192}}, body); };
  std::vector<Operation> tests = operations();
  std::erase_if(tests, [](const Operation& test) { return test.symmetric; });
  kill_at_each_step(run, tests);
}

TEST(comm_faults, a_stopped_rank_is_named_at_the_deadline) {
  const auto codes = run_processes(kWorld, 0.5, [](Rank& self) {
    auto shared = self.comm->allocate_shared(sizeof(pid_t));
    auto* victim = reinterpret_cast<pid_t*>(shared->data());
    if (self.rank == kVictim) *victim = ::getpid();
    self.comm->barrier(kBlocking);
    if (self.rank == kVictim) arm_fault(1, [] { ::kill(::getpid(), SIGSTOP); });
    bool is_named = false, is_told = false;
    try {
      self.comm->barrier({"stopped", false});
      self.comm->barrier(kBlocking);  // the victim had all it needed when it woke: it throws now
    } catch (const Timeout& error) {
      is_named = std::string(error.what()).find("rank 1 to enter it") != std::string::npos;
    } catch (const Error&) {
      is_told = true;
    }
    if (self.rank == 0) {
      ::usleep(200'000);  // until rank 2 has also given up
      ::kill(*victim, SIGCONT);
    }
    return is_named || (is_told && self.rank == kVictim);
  });
  for (const int code : codes) EXPECT_EQ(code, 0);
}

TEST(comm_faults, a_stopped_rank_is_named_at_the_deadline_over_sockets) {
  auto* victim =
      static_cast<pid_t*>(::mmap(nullptr, sizeof(pid_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto codes = run_link_processes(kWorld, {{0.5, 8192}}, [&](Rank& self) {
    if (self.rank == kVictim) *victim = ::getpid();
    self.comm->barrier(kBlocking);
    if (self.rank == kVictim) arm_fault(1, [] { ::kill(::getpid(), SIGSTOP); });
    std::string what;
    try {
      for (;;) self.comm->barrier({"stopped", false});
    } catch (const Error& error) {
      what = error.what();
    }
    if (self.rank == 0) {
      ::usleep(200'000);  // until rank 2 has also given up
      ::kill(*victim, SIGCONT);
    }
    const bool is_named = what.find("rank 1") != std::string::npos && what.find("stopped?") != std::string::npos;
    if (!is_named && self.rank != kVictim) std::cerr << "rank " << self.rank << ": " << what << std::endl;
    return is_named || self.rank == kVictim;
  });
  ::munmap(victim, sizeof(pid_t));
  for (const int code : codes) EXPECT_EQ(code, 0);
}

}  // namespace faults_test
