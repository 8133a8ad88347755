// ThreadPool: a fixed set of workers for elementwise passes.
//
// Its size is the number of CPUs that this process may use, divided by the local ranks (not OMP_NUM_THREADS, which
// torchrun sets to 1). Workers sleep when idle. In a forked child, which has no workers, the caller does all the work.
// Thread rule: parallel_for may be called from any thread; calls are serialised.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace zcomm {

class ThreadPool {
 public:
  using Body = std::function<void(std::size_t, std::size_t)>;
  explicit ThreadPool(int size);
  ~ThreadPool();
  int size() const;
  /// Waits for the running loop; not from within one.
  void resize(int size);
  /// Calls body(begin, end) on parts of [0, count) that begin at multiples of `grain`; the caller works too. All
  /// threads use DefaultFloatMode. At most `limit` threads (0: all). An exception of body is rethrown.
  void parallel_for(std::size_t count, std::size_t grain, int limit, const Body& body);
  /// The same, but the caller does not wait for the end of another loop: while one runs, the caller processes one
  /// `piece` (a multiple of `grain`) after the other by itself. All threads share the rest.
  void parallel_for_if_idle(std::size_t count, std::size_t grain, int limit, std::size_t piece, const Body& body);

  /// The core's own pool; sized at first use by set_default_size(), or by the CPUs in the affinity mask over the ranks
  /// on this host, as in the launcher's variables.
  static ThreadPool& shared();
  /// The size with which shared() begins, or that it has from now on: its threads change, the pool stays, so that other
  /// threads may continue to use it. Waits for the running loop.
  static void set_default_size(int size);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zcomm
