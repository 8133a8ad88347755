// Executor: runs the operations of a communicator one at a time, in call order.
//
// A blocking call on an idle executor runs on the calling thread (no hand-off, no allocation); everything else queues
// for a thread of the executor's own, which starts when it is first needed. The queue is a fixed ring of Operations
// that are filled in place, so that nothing is allocated in the steady state; a full ring makes the caller wait.
// Invariants: at most one operation runs at a time; each queued operation's Work is finished exactly once, also by
// stop(). Thread rule: free-threaded; `run` is called on the caller's thread or on the executor's.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "coll/operation.hpp"

namespace zcomm::coll {

class Executor {
 public:
  static constexpr std::size_t kDepth = 256;
  static constexpr std::size_t kWarmCompletions = 64;  ///< made at the start; more only if more are in flight

  /// `run` throws what becomes the operation's error.
  explicit Executor(std::function<void(Operation&)> run);
  ~Executor() { stop(); }

  /// Calls `fill(operation, spares)` on a free Operation (after waiting for one), and queues or runs it. With `async`
  /// the Work tells its end; without, it has ended, and its error is thrown here. Throws Error after stop().
  template <class Fill>
  Work submit(const Fill& fill, bool async) {
    std::unique_lock lock(mutex_);
    if (!async && count_ == 0 && !busy_ && !stopping_) {
      fill(here_, spares_);
      run_here(lock);
      return {};
    }
    Operation& operation = claim(lock);
    fill(operation, spares_);
    Work work = commit(operation);
    if (async) return work;
    lock.unlock();
    wait_patiently(work);
    return {};
  }

  /// Runs what is queued (the engine ends it at once when the communicator is closing) and joins the thread.
  void stop() noexcept;

 private:
  Operation& claim(std::unique_lock<std::mutex>& lock);
  Work commit(Operation& operation);
  void run_here(std::unique_lock<std::mutex>& lock);
  static void wait_patiently(Work& work);
  void loop() noexcept;

  std::function<void(Operation&)> run_;
  std::mutex mutex_;
  std::condition_variable queued_, freed_;
  bool busy_ = false;  // an operation is running, here or there
  Operation here_;     // the one of a blocking caller
  std::vector<Operation> ring_{kDepth};
  std::size_t head_ = 0, count_ = 0;
  SpareItems spares_;
  CompletionPool completions_;
  bool stopping_ = false;
  std::mutex join_mutex_;
  std::thread thread_;
};

}  // namespace zcomm::coll
