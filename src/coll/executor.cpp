// Running on the caller's thread or on a thread of its own (coll/executor.hpp).
#include "coll/executor.hpp"

#include <chrono>
#include <exception>
#include <utility>

#include "base/error.hpp"
#include "base/interrupt.hpp"

namespace zcomm::coll {
namespace {
constexpr std::chrono::milliseconds kSlice{50};  // between looks at signals
}

Executor::Executor(std::function<void(Operation&)> run, std::shared_ptr<GiveUp> give_up)
    : run_(std::move(run)), give_up_(std::move(give_up)) {
  spares_.reserve(kDepth);
  // Timing decides how many are in flight at once, so the pool is filled now and not in step 1000.
  std::vector<std::shared_ptr<Completion>> warm;
  for (std::size_t i = 0; i < kWarmCompletions; ++i) warm.push_back(completions_.acquire());
  for (const auto& completion : warm) completion->finish();
}

Operation& Executor::claim(std::unique_lock<std::mutex>& lock) {
  while (!freed_.wait_for(lock, kSlice, [this] { return is_stopping() || count() < kDepth; })) {
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
  if (is_stopping()) throw Error("the communicator is closed");
  return ring_[(head_ + count()) % kDepth];
}

Work Executor::commit(Operation& operation) {
  operation.completion = completions_.acquire();
  Work work(operation.completion);
  state_.fetch_add(1);
  if (thread_.joinable())
    queued_.notify_one();
  else
    thread_ = std::thread([this] { loop(); });
  return work;
}

void Executor::run_here() {
  std::exception_ptr error;
  runs_here_ = true;
  try {
    run_(here_);
  } catch (...) {
    error = std::current_exception();
  }
  here_.items.give_back(here_spares_);
  here_.tail.reset();
  runs_here_ = false;
  leave();
  if (error) std::rethrow_exception(error);
}

void Executor::leave() noexcept {
  if (state_.fetch_and(~kBusy, std::memory_order_acq_rel) == kBusy) return;
  // A thread that queued or stopped meanwhile may sleep: under the lock it sleeps already, or has seen the change.
  const std::lock_guard lock(mutex_);
  queued_.notify_one();
  freed_.notify_all();
}

void Executor::wait_patiently(Work& work) {
  try {
    while (!work.wait_for(std::chrono::duration<double>(kSlice).count(), true)) check_interrupt();
  } catch (...) {
    work.give_up();  // else dropping it would wait for the other ranks
    throw;
  }
  work.wait();
}

void Executor::loop() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    queued_.wait(lock, [this] { return (is_stopping() || count() > 0) && (state_.load() & kBusy) == 0; });
    if (count() == 0) return;
    // A blocking caller gets its turn only while nothing is queued, so no other thread can have set kBusy since.
    state_.fetch_or(kBusy);
    Operation& operation = ring_[head_];
    lock.unlock();
    std::exception_ptr error;
    try {
      run_(operation);
    } catch (...) {
      error = std::current_exception();
    }
    const std::shared_ptr<Completion> completion = std::move(operation.completion);
    std::shared_ptr<DeviceTail> tail = std::move(operation.tail);
    if (error) tail.reset();
    lock.lock();
    operation.items.give_back(spares_);
    head_ = (head_ + 1) % kDepth;
    state_.fetch_sub(kBusy + 1);
    freed_.notify_all();
    lock.unlock();
    completion->finish(std::move(error), std::move(tail));
    lock.lock();
  }
}

void Executor::stop_within(const std::exception_ptr& error) noexcept {
  std::vector<std::shared_ptr<Completion>> ended;
  {
    const std::lock_guard lock(mutex_);
    state_.fetch_or(kStopping);
    // The thread starts nothing while it cannot have the lock, and runs nothing while a caller does.
    for (; runs_here_ && count() > 0; head_ = (head_ + 1) % kDepth, state_.fetch_sub(1)) {
      Operation& operation = ring_[head_];
      ended.push_back(std::move(operation.completion));
      operation.tail.reset();
      operation.items.give_back(spares_);
    }
    queued_.notify_all();
    freed_.notify_all();
  }
  for (const auto& completion : ended) completion->finish(error);
}

void Executor::stop() noexcept {
  {
    std::unique_lock lock(mutex_);
    state_.fetch_or(kStopping);
    queued_.notify_all();
    freed_.notify_all();
    freed_.wait(lock, [this] { return (state_.load() & kBusy) == 0; });
    queued_.notify_all();
  }
  const std::lock_guard join(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

}  // namespace zcomm::coll
