// The progress thread (coll/progress_queue.hpp).
#include "coll/progress_queue.hpp"

#include <exception>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {

ProgressQueue::ProgressQueue(std::function<void(Operation&)> run) : run_(std::move(run)) {
  spares_.reserve(kDepth);
  // How many are in flight at once is a matter of timing, so the pool is not left to find out in step 1000.
  std::vector<std::shared_ptr<Completion>> warm;
  for (std::size_t i = 0; i < kWarmCompletions; ++i) warm.push_back(completions_.acquire());
  for (const auto& completion : warm) completion->finish();
  thread_ = std::thread([this] { loop(); });
}

Operation& ProgressQueue::claim(std::unique_lock<std::mutex>& lock) {
  freed_.wait(lock, [this] { return stopping_ || count_ < kDepth; });
  if (stopping_) throw Error("the communicator is closed");
  return ring_[(head_ + count_) % kDepth];
}

Work ProgressQueue::commit(Operation& operation) {
  operation.completion = completions_.acquire();
  Work work(operation.completion);
  ++count_;
  queued_.notify_one();
  return work;
}

void ProgressQueue::loop() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    queued_.wait(lock, [this] { return stopping_ || count_ > 0; });
    if (count_ == 0) return;
    Operation& operation = ring_[head_];
    lock.unlock();
    std::exception_ptr error;
    try {
      run_(operation);
    } catch (...) {
      error = std::current_exception();
    }
    const std::shared_ptr<Completion> completion = std::move(operation.completion);
    lock.lock();
    operation.items.give_back(spares_);
    head_ = (head_ + 1) % kDepth;
    --count_;
    freed_.notify_all();
    lock.unlock();
    completion->finish(std::move(error));
    lock.lock();
  }
}

void ProgressQueue::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  queued_.notify_all();
  freed_.notify_all();
  const std::lock_guard join(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

}  // namespace zcomm::coll
