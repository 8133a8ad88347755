// Work: the handle of an asynchronous operation (decision D6).
//
// A Work is a move-only reference to a Completion that the runner of the operation finishes exactly once.
// wait() rethrows the operation's error, done() polls, dropping an unfinished Work waits for it.
// Thread rule: any thread may wait; a Work object itself is used by one thread at a time.
// Completions come from a pool, so that a steady state allocates nothing.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace zcomm {

class CompletionPool;

/// Shared state of one operation: finished once, waited for by any number of threads.
class Completion {
 public:
  /// Marks the operation done; `error` is rethrown by every wait(). Call exactly once.
  void finish(std::exception_ptr error = nullptr) noexcept;
  /// Blocks until finished. Throws Timeout after `timeout_s` (the operation goes on), or the operation's error.
  void wait(std::optional<double> timeout_s);
  /// Blocks until finished; never throws.
  void wait_quietly() noexcept;
  /// Blocks until finished or `patience_s` is over; returns whether it is finished. Never throws.
  bool wait_for(double patience_s) noexcept;
  bool done() const;
  /// Whether some wait() has thrown the operation's error.
  bool error_reported() const;

 private:
  friend class CompletionPool;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  bool reported_ = false;
  std::exception_ptr error_;
};

class Work {
 public:
  Work() = default;  ///< already done
  explicit Work(std::shared_ptr<Completion> completion) : completion_(std::move(completion)) {}
  Work(Work&&) noexcept = default;
  Work& operator=(Work&& other) noexcept;
  ~Work();

  /// Blocks until the operation ended. Throws its error, or Timeout when `timeout_s` passes first.
  /// Waiting again after success is a no-op.
  void wait(std::optional<double> timeout_s = std::nullopt);
  bool done() const;
  /// Blocks for `patience_s` at most; returns whether the operation ended. Its error waits for wait().
  bool wait_for(double patience_s) noexcept;

 private:
  std::shared_ptr<Completion> completion_;
};

/// Reuses Completions: acquire() allocates only when more are in flight than ever before.
class CompletionPool {
 public:
  CompletionPool();
  std::shared_ptr<Completion> acquire();

 private:
  struct FreeList;
  std::shared_ptr<FreeList> free_;
};

}  // namespace zcomm
