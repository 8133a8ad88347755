// The list of loads (base/worker_load.hpp).
#include "base/worker_load.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

namespace zcomm {
namespace {

struct Loads {
  std::mutex mutex;
  std::vector<const WorkerLoad*> all;
};

Loads& loads() {
  static auto* const only = new Loads;  // threads may serve while the process ends
  // A thread that a forked child lacks may have held the lock.
  static const int has_handler = pthread_atfork(nullptr, nullptr, [] { new (only) Loads; });
  static_cast<void>(has_handler);
  return *only;
}

thread_local const WorkerLoad* served = nullptr;

/// Replaces the feeder if there are several.
ThreadId several() noexcept {
  static const char place = 0;
  return &place;
}

}  // namespace

ThreadId this_thread() noexcept {
  static std::atomic<std::uintptr_t> latest{0};
  static thread_local const std::uintptr_t number = latest.fetch_add(1, std::memory_order_relaxed) + 1;
  return reinterpret_cast<ThreadId>(number);
}

WorkerLoad::WorkerLoad() {
  const std::lock_guard lock(loads().mutex);
  loads().all.push_back(this);
}

WorkerLoad::~WorkerLoad() {
  const std::lock_guard lock(loads().mutex);
  std::erase(loads().all, this);
}

void WorkerLoad::add() noexcept {
  const ThreadId here = this_thread();
  ThreadId feeder = nullptr;
  if (!feeder_.compare_exchange_strong(feeder, here) && feeder != here) feeder_ = several();
  left_.fetch_add(1);
}

void WorkerLoad::serve() noexcept {
  served = this;
  thread_ = this_thread();
}

void WorkerLoad::begin_wait() {
  const std::lock_guard lock(loads().mutex);
  waiters_.push_back(this_thread());
}

void WorkerLoad::end_wait() noexcept {
  const std::lock_guard lock(loads().mutex);
  std::erase(waiters_, this_thread());
}

bool WorkerLoad::serves() noexcept { return served != nullptr; }

bool WorkerLoad::serves_only(ThreadId feeder) noexcept {
  if (served == nullptr || served->feeder_ == feeder) return served != nullptr;
  const std::lock_guard lock(loads().mutex);
  const auto& all = loads().all;
  ThreadId by = served->feeder_;
  for (std::size_t left = all.size(); left > 0 && by != feeder; --left) {
    const auto load = std::find_if(all.begin(), all.end(), [&](const WorkerLoad* each) { return each->thread_ == by; });
    if (by == nullptr || load == all.end()) return false;
    by = (*load)->feeder_;
  }
  return by == feeder;
}

bool WorkerLoad::is_awaited(ThreadId thread, ThreadId waiter) noexcept {
  const std::lock_guard lock(loads().mutex);
  return std::any_of(loads().all.begin(), loads().all.end(), [&](const WorkerLoad* each) {
    return each->thread_ == thread &&
           std::find(each->waiters_.begin(), each->waiters_.end(), waiter) != each->waiters_.end();
  });
}

bool WorkerLoad::any_left(ThreadId but) noexcept {
  const std::lock_guard lock(loads().mutex);
  return std::any_of(loads().all.begin(), loads().all.end(),
                     [&](const WorkerLoad* each) { return each->thread_ != but && each->left_ > 0; });
}

}  // namespace zcomm
