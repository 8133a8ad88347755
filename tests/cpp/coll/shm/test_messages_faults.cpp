// A rank that is killed at any step of any message, as sender or as receiver: a rank that waits for it gets PeerLost,
// the others continue, none hangs. Every step that others can see is a fault point (base/fault.hpp); see
// coll/test_faults.cpp.
#include <csignal>

#include "base/fault.hpp"
#include "coll/support/process_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr int kWorld = 3, kVictim = 1;
constexpr double kSoon_s = 5;

/// Rank 0 and the victim exchange `count` floats; `first` sends first, in the background if it is large.
void exchange(Communicator& comm, std::size_t count, int first) {
  const int peer = comm.rank() == 0 ? kVictim : 0;
  std::vector<float> mine(count, 1.0f), theirs(count);
  const ConstBuffer in{mine.data(), count};
  const Buffer out{theirs.data(), count};
  if (comm.rank() == first) {
    Work sent = comm.send({&in, 1}, DType::float32, peer, 0);
    comm.recv({&out, 1}, DType::float32, peer, 0, kBlocking);
    sent.wait();
  } else {
    comm.recv({&out, 1}, DType::float32, peer, 0, kBlocking);
    comm.send({&in, 1}, DType::float32, peer, 0, kBlocking);
  }
}

bool is_told(Rank& self, std::size_t count, int first) {
  const auto begin = std::chrono::steady_clock::now();
  bool is_lost = false;
  for (int call = 0; call < 4 && !is_lost; ++call) {
    try {
      exchange(*self.comm, count, first);
    } catch (const PeerLost& lost) {
      is_lost = lost.rank == kVictim;
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return is_lost && took.count() < kSoon_s;
}

/// Rank 2 does not wait for the victim, and is served whatever becomes of it.
bool goes_on(Rank& self, const char* step) {
  float value = 7;
  const Buffer out{&value, 1};
  const ConstBuffer in{&value, 1};
  const Call call(step, false);
  if (self.rank == 2) {
    self.comm->send({&in, 1}, DType::float32, 0, 5, call);
    self.comm->recv({&out, 1}, DType::float32, 0, 6, call);
    return true;
  }
  self.comm->recv({&out, 1}, DType::float32, 2, 5, call);
  self.comm->send({&in, 1}, DType::float32, 2, 6, call);
  return value == 7;
}

/// Whether the victim died.
bool kill_at(std::size_t count, int first, int point) {
  const auto codes = run_processes(kWorld, 60.0, [&](Rank& self) {
    self.comm->barrier(kBlocking);
    if (self.rank == 2) return goes_on(self, "beside");
    if (self.rank == 0) return is_told(self, count, first) && goes_on(self, "beside");
    arm_fault(point, [] { ::kill(::getpid(), SIGKILL); });
    exchange(*self.comm, count, first);
    arm_fault(0, nullptr);
    ::_exit(9);  // all points are passed; without a goodbye, so that rank 0 gets PeerLost as well
  });
  for (const int r : {0, 2})
    if (codes[static_cast<std::size_t>(r)] != 0)
      fail(__FILE__, __LINE__,
           std::to_string(count) + " elements, rank " + std::to_string(first) + " sends first, point " +
               std::to_string(point) + ": rank " + std::to_string(r) + " ended with " +
               std::to_string(codes[static_cast<std::size_t>(r)]));
  EXPECT_TRUE(codes[kVictim] == -SIGKILL || codes[kVictim] == 9);
  return codes[kVictim] == -SIGKILL;
}

}  // namespace

/// Under a sanitizer at every third step, with another offset for each variant.
TEST(messages_faults, killed_at_each_step_of_a_message) {
  constexpr int kStride = kSanitized ? 3 : 1;
  int way = 0;
  for (const std::size_t count : {10, 6000}) {  // inline; six slots
    for (const int first : {0, kVictim}) {
      int point = 1 + way++ % kStride;
      while (kill_at(count, first, point)) point += kStride;
      EXPECT_GE(point, count == 10 ? 3 : 15);
    }
  }
}
