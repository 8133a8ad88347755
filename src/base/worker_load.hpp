// WorkerLoad: how many calls a thread that serves a queue has left, and whether another thread waits for one of them.
//
// It distinguishes a thread that will continue by itself from one that rests until its feeder continues, for
// coll/shm/standstill.hpp. The list of all loads belongs to the process. In a forked child, which lacks these threads,
// the list is empty. Thread rule: free-threaded.
#pragma once

#include <atomic>
#include <vector>

namespace zcomm {

/// Identifies a thread of this process; never reused after its end. Not an address to dereference.
using ThreadId = const void*;
ThreadId this_thread() noexcept;

class WorkerLoad {
 public:
  WorkerLoad();
  ~WorkerLoad();
  WorkerLoad(const WorkerLoad&) = delete;
  WorkerLoad& operator=(const WorkerLoad&) = delete;

  /// On the thread itself: it serves the queue from now on.
  void serve() noexcept;
  /// On the thread that puts a call into the queue, before the serving thread can see it.
  void add() noexcept;
  /// A call has ended.
  void done() noexcept { left_.fetch_sub(1); }
  /// This thread waits for a call, until end_wait().
  void begin_wait();
  void end_wait() noexcept;

  /// Whether this thread serves a queue.
  static bool serves() noexcept;
  /// Whether this thread serves a queue that only `feeder` has fed, itself or through such threads.
  static bool serves_only(ThreadId feeder) noexcept;
  /// Whether `thread` serves a queue, and `waiter` waits for one of its calls.
  static bool is_awaited(ThreadId thread, ThreadId waiter) noexcept;
  /// Whether a thread other than `but` has calls left.
  static bool any_left(ThreadId but) noexcept;

 private:
  std::atomic<ThreadId> thread_{nullptr}, feeder_{nullptr};
  std::atomic<int> left_{0};
  std::vector<ThreadId> waiters_;  // under the mutex of the list
};

}  // namespace zcomm
