// Running on the caller's thread or on a thread of its own (coll/executor.hpp).
#include "coll/executor.hpp"

#include <exception>
#include <utility>

#include "base/error.hpp"
#include "base/interrupt.hpp"

namespace zcomm::coll {

Executor::Executor(std::function<void(Operation&)> run) : run_(std::move(run)) {
  spares_.reserve(kDepth);
  // How many are in flight at once is a matter of timing, so the pool is not left to find out in step 1000.
  std::vector<std::shared_ptr<Completion>> warm;
  for (std::size_t i = 0; i < kWarmCompletions; ++i) warm.push_back(completions_.acquire());
  for (const auto& completion : warm) completion->finish();
}

Operation& Executor::claim(std::unique_lock<std::mutex>& lock) {
  freed_.wait(lock, [this] { return stopping_ || count_ < kDepth; });
  if (stopping_) throw Error("the communicator is closed");
  return ring_[(head_ + count_) % kDepth];
}

Work Executor::commit(Operation& operation) {
  operation.completion = completions_.acquire();
  Work work(operation.completion);
  ++count_;
  if (thread_.joinable())
    queued_.notify_one();
  else
    thread_ = std::thread([this] { loop(); });
  return work;
}

void Executor::run_here(std::unique_lock<std::mutex>& lock) {
  busy_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    run_(here_);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  here_.items.give_back(spares_);
  busy_ = false;
  if (count_ > 0) queued_.notify_one();
  if (stopping_) freed_.notify_all();
  if (error) std::rethrow_exception(error);
}

void Executor::wait_patiently(Work& work) {
  constexpr double kSlice_s = 0.05;
  while (!work.wait_for(kSlice_s)) check_interrupt();
  work.wait();
}

void Executor::loop() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    queued_.wait(lock, [this] { return !busy_ && (stopping_ || count_ > 0); });
    if (count_ == 0) return;
    Operation& operation = ring_[head_];
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      run_(operation);
    } catch (...) {
      error = std::current_exception();
    }
    const std::shared_ptr<Completion> completion = std::move(operation.completion);
    lock.lock();
    busy_ = false;
    operation.items.give_back(spares_);
    head_ = (head_ + 1) % kDepth;
    --count_;
    freed_.notify_all();
    lock.unlock();
    completion->finish(std::move(error));
    lock.lock();
  }
}

void Executor::stop() noexcept {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    queued_.notify_all();
    freed_.notify_all();
    freed_.wait(lock, [this] { return !busy_; });
  }
  queued_.notify_all();
  const std::lock_guard join(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

}  // namespace zcomm::coll
