// Work: the handle of an asynchronous operation (decision D6).
//
// A Work is a move-only reference to a Completion that the runner of the operation finishes exactly once.
// wait() rethrows the operation's error, done() polls, dropping an unfinished Work waits for it.
// An operation on a device ends twice: on the host, when all of it is on a stream, and on the device. wait() blocks
// only for the first end, and makes the stream that the call named wait for the second.
// Thread rule: any thread may wait; a Work object itself is used by one thread at a time.
// Completions come from a pool, so that a steady state allocates nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace zcomm {

/// Returns an error with more about it in place of another.
using Explain = std::function<std::exception_ptr(const std::exception_ptr&)>;

class Completion;
class CompletionPool;

/// The remaining work of an operation on a device after its end on the host. Thread rule: free-threaded.
class DeviceTail {
 public:
  virtual ~DeviceTail() = default;
  /// Orders later work of `stream` (its native handle; none: the stream that the call named) after the operation. Does
  /// not wait for the device, unless that stream is the host itself. Throws the operation's known failure.
  virtual void order(std::optional<std::uintptr_t> stream) = 0;
  /// Blocks the host for `patience_s` at most; returns whether the device has passed it. Orders no stream. Throws the
  /// operation's known failure.
  virtual bool wait_for(double patience_s) = 0;
  /// Called if no stream was ordered after it and none will be: orders the call's stream.
  virtual void drop() noexcept = 0;
  /// Whether the device has passed it, or never will.
  virtual bool done() noexcept = 0;

  /// order() and wait_for() with an error that says more, as the runner of the operation wants it.
  void order_explained(std::optional<std::uintptr_t> stream);
  bool wait_explained(double patience_s);
  std::shared_ptr<const Explain> explain;
};

/// Ends an operation early, for a program that waits for it and has to stop. Thread rule: free-threaded.
class GiveUp {
 public:
  using Function = std::function<void(const Completion&)>;
  explicit GiveUp(Function function) : function_(std::move(function)) {}
  /// Makes the operation of `completion` end soon, with an error. No effect after detach().
  void operator()(const Completion& completion) noexcept;
  /// Blocks while a call runs; later calls do nothing.
  void detach() noexcept;
  /// The thread that waits for the end of an operation of this runner, however long it takes (base/worker_load.hpp);
  /// null if none is known.
  const void* waiting() const noexcept { return waiting_.load(); }

 private:
  friend class Completion;
  std::mutex mutex_;
  Function function_;
  std::atomic<const void*> waiting_{nullptr};
};

/// Shared state of one operation: finished once, waited for by any number of threads.
class Completion {
 public:
  explicit Completion(std::shared_ptr<GiveUp> give_up = nullptr) : give_up_(std::move(give_up)) {}
  /// Marks the operation done; `error` is rethrown by every wait(). Call exactly once.
  void finish(std::exception_ptr error = nullptr, std::shared_ptr<DeviceTail> tail = nullptr) noexcept;
  /// Blocks until finished. Throws Timeout after `timeout_s` (the operation continues), or the operation's error.
  void wait(std::optional<double> timeout_s);
  /// Blocks until finished; never throws.
  void wait_quietly() noexcept;
  /// Blocks until finished or `patience_s` has passed; returns whether it is finished. Never throws. to_the_end: the
  /// caller repeats the call until the end.
  bool wait_for(double patience_s, bool to_the_end = false) noexcept;
  bool done() const;
  /// The error of a finished operation; null if it succeeded. Does not count as reported.
  std::exception_ptr error() const;
  /// Whether some wait() has thrown the operation's error.
  bool error_reported() const;
  /// The tail of a finished operation; null if there is none.
  std::shared_ptr<DeviceTail> tail() const;
  void drop_tail() noexcept;
  /// drop_tail() leaves the tail in place: another runner will wait for it.
  void keep_tail() noexcept;
  /// Makes the operation end soon, if its runner can do that; it is finished in any case.
  void give_up() noexcept;

 private:
  friend class CompletionPool;
  class Waiting;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  bool reported_ = false;
  bool tail_kept_ = false;
  std::exception_ptr error_;
  std::shared_ptr<DeviceTail> tail_;
  const std::shared_ptr<GiveUp> give_up_;
};

class Work {
 public:
  Work() = default;  ///< already done
  explicit Work(std::shared_ptr<Completion> completion);
  Work(Work&&) noexcept = default;
  Work& operator=(Work&& other) noexcept;
  ~Work();

  /// Blocks until the operation ended (on a device: see above). Throws its error, or Timeout when `timeout_s` passes
  /// first. Waiting again after success is a no-op.
  void wait(std::optional<double> timeout_s = std::nullopt);
  /// The same, but the stream with this native handle waits for the device.
  void wait_on(std::uintptr_t stream, std::optional<double> timeout_s = std::nullopt);
  bool done() const;
  /// Blocks for `patience_s` at most; returns whether the operation ended. Its error is kept for wait(). In a forked
  /// child true at once, because there is nothing to wait for, and wait() throws. to_the_end: the caller repeats the
  /// call until the end.
  bool wait_for(double patience_s, bool to_the_end = false) noexcept;
  /// For a runner that begins something after this operation: its completion, with its tail to come; null if there is
  /// none (done). Throws Error in a forked child.
  std::shared_ptr<Completion> follow() const;
  /// Makes an unfinished operation end soon, with an error; a collective gives its communicator up. An operation that
  /// cannot be ended (a transfer of a drive) continues. Then wait() and the destructor do not wait for other ranks.
  void give_up() noexcept;
  /// An error of the operation passes through `explain`, which is free-threaded, before wait() throws it.
  void explain_by(std::shared_ptr<const Explain> explain) { explain_ = std::move(explain); }

 private:
  void end() noexcept;
  void wait_for_end(std::optional<double> timeout_s);
  bool is_foreign() const noexcept;
  void check_own() const;
  std::shared_ptr<Completion> completion_;
  std::shared_ptr<const Explain> explain_;
  int forks_ = 0;  // fork_generation() at the start
};

/// Reuses Completions: acquire() allocates only if more are in flight than ever before.
class CompletionPool {
 public:
  /// give_up: shared by all its completions; null if operations cannot be ended.
  explicit CompletionPool(std::shared_ptr<GiveUp> give_up = nullptr);
  std::shared_ptr<Completion> acquire();

 private:
  struct FreeList;
  std::shared_ptr<FreeList> free_;
  std::shared_ptr<GiveUp> give_up_;
};

}  // namespace zcomm
