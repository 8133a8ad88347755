// The list of loads (base/worker_load.hpp).
#include "base/worker_load.hpp"

#include <algorithm>
#include <mutex>
#include <vector>

namespace zcomm {
namespace {

struct Loads {
  std::mutex mutex;
  std::vector<const WorkerLoad*> all;
};

Loads& loads() {
  static auto* const only = new Loads;  // threads may serve while the process ends
  return *only;
}

thread_local bool serves_queue = false;

}  // namespace

ThreadId this_thread() noexcept {
  static thread_local const char place = 0;
  return &place;
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

bool WorkerLoad::serves() noexcept { return serves_queue; }

bool WorkerLoad::is_awaited(ThreadId thread) noexcept {
  const std::lock_guard lock(loads().mutex);
  return std::any_of(loads().all.begin(), loads().all.end(),
                     [&](const WorkerLoad* each) { return each->thread_ == thread && each->awaited_ > 0; });
}

bool WorkerLoad::any_left(ThreadId but) noexcept {
  const std::lock_guard lock(loads().mutex);
  return std::any_of(loads().all.begin(), loads().all.end(),
                     [&](const WorkerLoad* each) { return each->thread_ != but && each->left_ > 0; });
}

}  // namespace zcomm
