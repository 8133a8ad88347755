// FakeNccl's kernels on streams: they wait for the other ranks' kernels, and then compute NCCL's results.
//
// The last rank to arrive carries out a collective for all; receivers carry out messages. Reductions are exact for
// small integers in any order. Mismatched calls fail the test. Thread rule: free-threaded; run() is called by the
// streams' threads and blocks them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace zcomm::test {

/// Fails the running test: the core called NCCL as NCCL forbids.
void complain(const std::string& what);

enum class FakeKind { all_reduce, reduce, reduce_scatter, all_gather, broadcast, send, recv };

/// One call within a group, with its arguments.
struct FakeTask {
  FakeKind kind;
  const void* in;
  void* out;
  std::size_t count;
  int dtype, op = 0;
  int other = -1;  ///< root, or the rank that is sent to or received from
};

/// Where the ranks of one communicator meet.
class Rendezvous {
 public:
  explicit Rendezvous(int ranks) : seats_(static_cast<std::size_t>(ranks)) {}

  /// The kernels of one group; `held`: they wait for an abort.
  void run(int rank, const std::vector<FakeTask>& tasks, bool held);
  /// Ends the kernels of `rank`, those that have not begun too, and blocks until none runs.
  void abort(int rank);
  /// Blocks until one runs.
  void wait_for_kernel(int rank);
  bool is_running(int rank);
  void let_calls_differ();

 private:
  struct Seat {
    bool aborted = false;
    int running = 0;
    std::uint64_t meetings = 0;
  };
  struct Meeting {
    std::vector<const FakeTask*> tasks;  // by rank
    std::size_t arrived = 0;
    bool done = false, differs = false;
  };
  struct Letter {
    const FakeTask* task;
    bool taken = false;
  };
  using Lock = std::unique_lock<std::mutex>;

  /// These return false once `rank` is aborted.
  bool wait(Lock& lock, int rank, const std::function<bool()>& until);
  bool meet(Lock& lock, int rank, const FakeTask& task);
  bool exchange(Lock& lock, int rank, const std::vector<FakeTask>& tasks);
  bool receive(Lock& lock, int rank, const FakeTask& task);
  Seat& seat(int rank) { return seats_[static_cast<std::size_t>(rank)]; }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Seat> seats_;
  bool may_differ_ = false;
  std::map<std::uint64_t, Meeting> meetings_;                     // by number
  std::map<std::pair<int, int>, std::deque<Letter*>> mailboxes_;  // from, to
};

}  // namespace zcomm::test
