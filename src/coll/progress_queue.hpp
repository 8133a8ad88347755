// ProgressQueue: runs operations one after the other on a thread of its own.
//
// A fixed ring of Operations that are filled in place, so that nothing is allocated in the steady state; a full ring
// makes the caller wait. Every submitted operation's Work is finished exactly once, also by stop().
// Thread rule: submit() and stop() are free-threaded; `run` is called on the queue's thread only.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "coll/operation.hpp"

namespace zcomm::coll {

class ProgressQueue {
 public:
  static constexpr std::size_t kDepth = 256;
  static constexpr std::size_t kWarmCompletions = 64;  ///< made at the start; more only if more are in flight

  /// `run` throws what becomes the operation's error.
  explicit ProgressQueue(std::function<void(Operation&)> run);
  ~ProgressQueue() { stop(); }

  /// Calls `fill(operation, spares)` on a free Operation (after waiting for one) and queues it. Throws Error after
  /// stop().
  template <class Fill>
  Work submit(const Fill& fill) {
    std::unique_lock lock(mutex_);
    Operation& operation = claim(lock);
    fill(operation, spares_);
    return commit(operation);
  }

  /// Runs what is queued (the runner ends it at once when the communicator is closing) and joins the thread.
  void stop() noexcept;

 private:
  Operation& claim(std::unique_lock<std::mutex>& lock);
  Work commit(Operation& operation);
  void loop() noexcept;

  std::function<void(Operation&)> run_;
  std::mutex mutex_;
  std::condition_variable queued_, freed_;
  std::vector<Operation> ring_{kDepth};
  std::size_t head_ = 0, count_ = 0;
  SpareItems spares_;
  CompletionPool completions_;
  bool stopping_ = false;
  std::mutex join_mutex_;
  std::thread thread_;
};

}  // namespace zcomm::coll
