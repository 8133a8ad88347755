// Work and its pool of completions (zcomm/work.hpp).
#include "zcomm/work.hpp"

#include <chrono>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/worker_load.hpp"

namespace zcomm {

void GiveUp::operator()(const Completion& completion) noexcept {
  const std::lock_guard lock(mutex_);
  if (function_) function_(completion);
}

void GiveUp::detach() noexcept {
  const std::lock_guard lock(mutex_);
  function_ = nullptr;
}

/// Reports the waiting thread to the runner while it waits; not a thread that may continue before the end.
class Completion::Waiting {
 public:
  explicit Waiting(const Completion& completion, bool to_the_end = true)
      : give_up_(completion.done_ || !to_the_end ? nullptr : completion.give_up_.get()) {
    if (give_up_ != nullptr) give_up_->waiting_ = this_thread();
  }
  ~Waiting() {
    if (give_up_ != nullptr) give_up_->waiting_ = nullptr;
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  GiveUp* const give_up_;
};

namespace {

template <class Function>
auto with_explanation(const std::shared_ptr<const Explain>& explain, const Function& function) {
  if (!explain) return function();
  try {
    return function();
  } catch (const Interrupted&) {
    throw;
  } catch (...) {
    std::rethrow_exception((*explain)(std::current_exception()));
  }
}

}  // namespace

void DeviceTail::order_explained(std::optional<std::uintptr_t> stream) {
  with_explanation(explain, [&] { order(stream); });
}

bool DeviceTail::wait_explained(double patience_s) {
  return with_explanation(explain, [&] { return wait_for(patience_s); });
}

void Completion::finish(std::exception_ptr error, std::shared_ptr<DeviceTail> tail) noexcept {
  // Notify under the lock: a waiter may return the completion to the pool as soon as it sees done_.
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  tail_ = std::move(tail);
  done_ = true;
  changed_.notify_all();
}

void Completion::wait(std::optional<double> timeout_s) {
  if (!timeout_s) {
    wait_quietly();
  } else if (!wait_for(*timeout_s)) {
    throw Timeout(text("Work.wait: not done after ", *timeout_s, " s; the operation goes on"));
  }
  const std::lock_guard lock(mutex_);
  if (!error_) return;
  reported_ = true;
  std::rethrow_exception(error_);
}

bool Completion::wait_for(double patience_s, bool to_the_end) noexcept {
  std::unique_lock lock(mutex_);
  const Waiting waiting(*this, to_the_end);
  return changed_.wait_for(lock, std::chrono::duration<double>(patience_s), [this] { return done_; });
}

void Completion::wait_quietly() noexcept {
  std::unique_lock lock(mutex_);
  const Waiting waiting(*this);
  changed_.wait(lock, [this] { return done_; });
}

bool Completion::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

std::exception_ptr Completion::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool Completion::error_reported() const {
  const std::lock_guard lock(mutex_);
  return reported_;
}

std::shared_ptr<DeviceTail> Completion::tail() const {
  const std::lock_guard lock(mutex_);
  return tail_;
}

void Completion::drop_tail() noexcept {
  std::shared_ptr<DeviceTail> tail;
  {
    const std::lock_guard lock(mutex_);
    tail = tail_;
    if (!tail_kept_) tail_ = nullptr;
  }
  if (tail) tail->drop();
}

void Completion::keep_tail() noexcept {
  const std::lock_guard lock(mutex_);
  tail_kept_ = true;
}

void Completion::give_up() noexcept {
  if (give_up_ && !done()) (*give_up_)(*this);
}

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    end();
    completion_ = std::move(other.completion_);
    explain_ = std::move(other.explain_);
    forks_ = other.forks_;
  }
  return *this;
}

Work::~Work() { end(); }

void Work::end() noexcept {
  if (!completion_) return;
  if (is_foreign()) {  // its locks have the state of the fork: they must not even be destroyed
    new std::shared_ptr<Completion>(std::move(completion_));
    return;
  }
  completion_->wait_quietly();
  completion_->drop_tail();
}

bool Work::is_foreign() const noexcept { return completion_ && forks_ != fork_generation(); }

void Work::check_own() const {
  if (is_foreign())
    throw Error("Work: the operation was started before this process was forked; only the parent can wait for it");
}

void Work::wait_for_end(std::optional<double> timeout_s) {
  check_own();
  try {
    completion_->wait(timeout_s);
  } catch (...) {
    if (!explain_ || !completion_->done()) throw;  // not done: its timeout
    std::rethrow_exception((*explain_)(std::current_exception()));
  }
}

void Work::wait(std::optional<double> timeout_s) {
  if (!completion_) return;
  wait_for_end(timeout_s);
  if (const auto tail = completion_->tail()) tail->order_explained(std::nullopt);
}

void Work::wait_on(std::uintptr_t stream, std::optional<double> timeout_s) {
  if (!completion_) return;
  wait_for_end(timeout_s);
  if (const auto tail = completion_->tail()) tail->order_explained(stream);
}

bool Work::done() const {
  if (!completion_) return true;
  check_own();
  if (!completion_->done()) return false;
  const auto tail = completion_->tail();
  return !tail || tail->done();
}

bool Work::wait_for(double patience_s, bool to_the_end) noexcept {
  return !completion_ || is_foreign() || completion_->wait_for(patience_s, to_the_end);
}

std::shared_ptr<Completion> Work::follow() const {
  check_own();
  if (completion_) completion_->keep_tail();
  return completion_;
}

void Work::give_up() noexcept {
  if (completion_ && !is_foreign()) completion_->give_up();
}

Work::Work(std::shared_ptr<Completion> completion) : completion_(std::move(completion)), forks_(fork_generation()) {}

// shared_ptr's control block cannot be pooled, so the pool keeps its own reference and reuses a completion once it
// is the only one left.
struct CompletionPool::FreeList {
  std::mutex mutex;
  std::vector<std::shared_ptr<Completion>> all;
  std::size_t next = 0;
};

CompletionPool::CompletionPool(std::shared_ptr<GiveUp> give_up)
    : free_(std::make_shared<FreeList>()), give_up_(std::move(give_up)) {}

std::shared_ptr<Completion> CompletionPool::acquire() {
  const std::lock_guard lock(free_->mutex);
  auto& all = free_->all;
  for (std::size_t tried = 0; tried < all.size(); ++tried) {
    auto& candidate = all[free_->next];
    free_->next = (free_->next + 1) % all.size();
    if (candidate.use_count() != 1) continue;
    const std::lock_guard candidate_lock(candidate->mutex_);
    if (!candidate->done_) continue;
    candidate->done_ = false;
    candidate->reported_ = false;
    candidate->tail_kept_ = false;
    candidate->error_ = nullptr;
    candidate->tail_ = nullptr;
    return candidate;
  }
  all.push_back(std::make_shared<Completion>(give_up_));
  return all.back();
}

}  // namespace zcomm
