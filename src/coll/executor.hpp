// Executor: runs the operations of a communicator one at a time, in call order.
//
// A blocking call on an idle executor runs on the calling thread (no hand-off, no allocation); everything else queues
// for a thread of the executor's own, which starts when it is first needed. The queue is a fixed ring of Operations
// that are filled in place, so that nothing is allocated in the steady state; a full ring makes the caller wait.
// Invariants: at most one operation runs at a time; each queued operation's Work is finished exactly once, also by
// stop(). Thread rule: free-threaded; `run` is called on the caller's thread or on the executor's. Handlers of signals
// run inside of submit(), with no lock held (check_interrupt).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
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

  /// The error that `run` throws is the operation's error. `give_up` makes the running and the queued operations end
  /// soon: it is called when a queued blocking call is interrupted, and by Work::give_up.
  Executor(std::function<void(Operation&)> run, std::shared_ptr<GiveUp> give_up);
  ~Executor() { stop(); }

  /// Calls `fill(operation, spares)` on a free Operation (after waiting for one), and queues or runs it. With `async`
  /// the Work reports its end; without, it has ended, and its error is thrown here. Throws Error after stop().
  template <class Fill>
  Work submit(const Fill& fill, bool async) {
    std::uint32_t idle = 0;
    if (!async && state_.compare_exchange_strong(idle, kBusy, std::memory_order_acquire)) {
      fill(here_, here_spares_);
      run_here();
      return {};
    }
    Work work = enqueue(fill);
    if (!async) wait_patiently(work);
    return work;
  }

  /// Whether nothing runs or is queued.
  bool is_idle() const { return state_.load() == 0; }
  /// For a thread inside submit(), instead of stop(), which would wait for that thread: starts nothing new. Operations
  /// that cannot run before that thread's operation has ended end with `error`. stop() follows.
  void stop_within(const std::exception_ptr& error) noexcept;
  /// Runs the queued operations (the engine ends them at once when the communicator is closing) and joins the thread.
  void stop() noexcept;

 private:
  // state_: kBusy while an operation runs, here or there; kStopping; and how many are queued or run by the thread.
  static constexpr std::uint32_t kBusy = 1u << 31, kStopping = 1u << 30, kCount = kStopping - 1;

  template <class Fill>
  Work enqueue(const Fill& fill) {
    std::unique_lock lock(mutex_);
    Operation& operation = claim(lock);
    fill(operation, spares_);
    return commit(operation);
  }
  Operation& claim(std::unique_lock<std::mutex>& lock);
  Work commit(Operation& operation);
  void run_here();
  void leave() noexcept;
  bool is_stopping() const { return (state_.load() & kStopping) != 0; }
  std::uint32_t count() const { return state_.load() & kCount; }
  void wait_patiently(Work& work);
  void loop() noexcept;

  const std::function<void(Operation&)> run_;
  const std::shared_ptr<GiveUp> give_up_;
  std::mutex mutex_;
  std::condition_variable queued_, freed_;
  std::atomic<std::uint32_t> state_{0};
  Operation here_;  // a blocking caller's, which has set kBusy
  SpareItems here_spares_;
  std::atomic<bool> runs_here_{false};  // within kBusy
  std::vector<Operation> ring_{kDepth};
  std::size_t head_ = 0;
  SpareItems spares_;
  CompletionPool completions_{give_up_};
  std::mutex join_mutex_;
  std::thread thread_;
};

}  // namespace zcomm::coll
