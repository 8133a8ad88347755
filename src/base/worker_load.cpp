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
  static const int registered = pthread_atfork(nullptr, nullptr, [] { new (only) Loads; });
  static_cast<void>(registered);
  return *only;
}

thread_local bool serves_queue = false;

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

void WorkerLoad::serve() noexcept {
  serves_queue = true;
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

bool WorkerLoad::serves() noexcept { return serves_queue; }

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
