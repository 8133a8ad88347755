#include "mem/swap_queue.hpp"

#include <algorithm>
#include <utility>

namespace zcomm::mem {
namespace {
constexpr std::size_t kFailuresKept = 64;  // failures that no wait() has fetched; the first ones name the cause
}

void SwapQueue::acquire_permit() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return permits_ < limit_ || refusal_; });
  if (refusal_) std::rethrow_exception(refusal_);
  ++permits_;
}

void SwapQueue::release_permit() {
  const std::lock_guard lock(mutex_);
  --permits_;
  changed_.notify_all();
}

Work SwapQueue::push(SwapEntry& entry, bool write, std::byte* data) {
  const std::lock_guard lock(mutex_);
  if (refusal_) {
    --permits_;
    std::rethrow_exception(refusal_);
  }
  if (spare_.empty()) {
    operations_.push_back(std::make_unique<SwapOperation>());
    spare_.reserve(operations_.size());  // so that returning one never allocates
    spare_.push_back(operations_.back().get());
  }
  SwapOperation& operation = *spare_.back();
  spare_.pop_back();
  operation = SwapOperation{};
  operation.write = write;
  operation.active = true;
  operation.entry = &entry;
  operation.data = data;
  operation.completion = completions_.acquire();
  Work work(operation.completion);
  ++pending_;
  if (entry.newest != nullptr) {
    entry.newest->next_of_key = &operation;
  } else {
    entry.oldest = &operation;
    make_ready(operation);
  }
  entry.newest = &operation;
  return work;
}

void SwapQueue::make_ready(SwapOperation& operation) {
  ReadyList& ready = ready_[operation.write ? 1 : 0];
  (ready.last != nullptr ? ready.last->next_ready : ready.first) = &operation;
  ready.last = &operation;
  if (sleeping_) {
    sleeping_ = false;
    engine_.wake();
  }
}

bool SwapQueue::idle(const SwapEntry& entry) const {
  const std::lock_guard lock(mutex_);
  return entry.oldest == nullptr;
}

void SwapQueue::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return pending_ == 0; });
}

void SwapQueue::rethrow_unreported() {
  std::shared_ptr<Completion> failure;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(failures_, [](const auto& each) { return each->error_reported(); });
    if (failures_.empty()) return;
    failure = failures_.front();
  }
  failure->wait(std::nullopt);
}

void SwapQueue::stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  if (std::exchange(sleeping_, false)) engine_.wake();
}

SwapOperation* SwapQueue::try_pop(bool write) {
  const std::lock_guard lock(mutex_);
  ReadyList& ready = ready_[write ? 1 : 0];
  SwapOperation* operation = ready.first;
  if (operation != nullptr) {
    ready.first = operation->next_ready;
    if (ready.first == nullptr) ready.last = nullptr;
  }
  return operation;
}

bool SwapQueue::sleep() {
  const std::lock_guard lock(mutex_);
  if (ready_[0].first != nullptr || ready_[1].first != nullptr || (stopping_ && pending_ == 0)) return false;
  sleeping_ = true;
  return true;
}

void SwapQueue::awake() {
  const std::lock_guard lock(mutex_);
  sleeping_ = false;
}

bool SwapQueue::finished() const {
  const std::lock_guard lock(mutex_);
  return stopping_ && pending_ == 0;
}

void SwapQueue::retire(SwapOperation& operation) {
  const std::lock_guard lock(mutex_);
  SwapEntry& entry = *operation.entry;
  entry.oldest = operation.next_of_key;
  if (entry.oldest == nullptr) {
    entry.newest = nullptr;
  } else {
    make_ready(*entry.oldest);
  }
  finish(operation, std::move(operation.error));
}

void SwapQueue::finish(SwapOperation& operation, std::exception_ptr error) {
  auto completion = std::move(operation.completion);
  operation.active = false;
  spare_.push_back(&operation);
  if (error) keep_failure(completion);
  // Under the lock: a thread that sees the Work done also sees the key idle; if it sees nothing pending, all Works are
  // done.
  completion->finish(std::move(error));
  --pending_;
  --permits_;
  changed_.notify_all();
}

void SwapQueue::keep_failure(std::shared_ptr<Completion> completion) {
  std::erase_if(failures_, [](const auto& each) { return each->done() && each->error_reported(); });
  if (failures_.size() < kFailuresKept) failures_.push_back(std::move(completion));
}

void SwapQueue::refuse(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  refusal_ = std::move(error);
  sleeping_ = false;
  changed_.notify_all();
}

void SwapQueue::fail_all() {
  const std::lock_guard lock(mutex_);
  ready_[0] = ready_[1] = {};
  for (auto& operation : operations_) {
    if (!operation->active) continue;
    operation->entry->oldest = operation->entry->newest = nullptr;
    finish(*operation, refusal_);
  }
}

}  // namespace zcomm::mem
