#include "base/thread_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/float_mode.hpp"
#include "base/fork.hpp"

namespace zcomm {
namespace {

int usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

/// Ranks on this host, as set by torchrun, `zcomm run` and mpirun; 1 if none is set.
int local_ranks() {
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"})
    if (const char* value = std::getenv(name))
      if (const int ranks = std::atoi(value); ranks > 0) return ranks;
  return 1;
}

using Body = ThreadPool::Body;

void alone(std::size_t count, const Body& body) {
  if (count == 0) return;
  const DefaultFloatMode mode;
  body(0, count);
}

int default_size() { return read_env().threads.value_or(std::max(1, usable_cpus() / local_ranks())); }

}  // namespace

struct ThreadPool::Impl {
  std::atomic<int> size{1};  // changes under `calls`
  const int forks = fork_generation();
  std::mutex calls;  // one parallel_for at a time
  std::mutex mutex;
  std::condition_variable wake, idle;
  std::vector<std::thread> workers;
  bool stopping = false;
  unsigned generation = 0;

  // The current loop; parts are claimed by index.
  const Body* body = nullptr;
  std::size_t count = 0, part = 0, parts = 0;
  std::atomic<std::size_t> next_part{0};
  int joined = 0, limit = 0, running = 0;
  std::exception_ptr error;

  /// The workers were not forked along, and the locks have the state of that moment.
  bool is_forked() const { return forks != fork_generation(); }

  void run_parts() {
    const DefaultFloatMode mode;
    try {
      for (std::size_t i = next_part.fetch_add(1); i < parts; i = next_part.fetch_add(1))
        (*body)(i* part, std::min(count, (i + 1) * part));
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      next_part = parts;
    }
  }

  int threads_for(std::size_t total, std::size_t grain, int most) const {
    if (is_forked()) return 1;
    const std::size_t grains = (total + std::max<std::size_t>(1, grain) - 1) / std::max<std::size_t>(1, grain);
    const int all = size;
    return static_cast<int>(std::min<std::size_t>(most > 0 ? std::min(most, all) : all, grains));
  }

  /// Called under `calls`.
  void share_out(std::size_t total, std::size_t grain, int threads, const Body& whole) {
    {
      const std::lock_guard lock(mutex);
      // Four parts per thread even out a delay when another process uses the core for a while.
      const std::size_t wanted = static_cast<std::size_t>(threads) * 4;
      grain = std::max<std::size_t>(1, grain);
      part = ((total + grain - 1) / grain + wanted - 1) / wanted * grain;
      parts = (total + part - 1) / part;
      count = total;
      body = &whole;
      next_part = 0;
      joined = 0;
      limit = threads - 1;
      error = nullptr;
      ++generation;
    }
    wake.notify_all();
    run_parts();
    std::unique_lock lock(mutex);
    limit = 0;  // latecomers find nothing to join
    idle.wait(lock, [&] { return running == 0; });
    body = nullptr;
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }

  /// Starts workers for `wanted` threads, including the caller. Under `calls`, or before the first call.
  void provide(int wanted) {
    if (wanted < size) dismiss();
    size = static_cast<int>(workers.size()) + 1;
    for (; size < wanted; ++size) workers.emplace_back([this] { work(); });
  }

  void dismiss() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
    workers.clear();
    stopping = false;
  }

  void work() {
    unsigned seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return stopping || generation != seen; });
      if (stopping) return;
      seen = generation;
      if (body == nullptr || joined >= limit) continue;
      ++joined;
      ++running;
      lock.unlock();
      run_parts();
      lock.lock();
      if (--running == 0) idle.notify_all();
    }
  }
};

namespace {
void check_size(int size) {
  if (size < 1) throw InvalidArgument(text("ThreadPool: size ", size, " is less than 1"));
}
}  // namespace

ThreadPool::ThreadPool(int size) : impl_(std::make_unique<Impl>()) {
  check_size(size);
  impl_->provide(size);
}

ThreadPool::~ThreadPool() {
  if (impl_->is_forked()) {
    static_cast<void>(impl_.release());  // the child has no such threads: joining or waking them would wait for ever
    return;
  }
  impl_->dismiss();
}

void ThreadPool::resize(int size) {
  check_size(size);
  const std::lock_guard call(impl_->calls);
  impl_->provide(size);
}

int ThreadPool::size() const { return impl_->size; }

void ThreadPool::parallel_for(std::size_t count, std::size_t grain, int limit, const Body& body) {
  const int threads = impl_->threads_for(count, grain, limit);
  if (threads <= 1) return alone(count, body);
  const std::lock_guard call(impl_->calls);
  impl_->share_out(count, grain, threads, body);
}

void ThreadPool::parallel_for_if_idle(std::size_t count, std::size_t grain, int limit, std::size_t piece,
                                      const Body& body) {
  std::size_t done = 0;
  const Body rest = [&](std::size_t begin, std::size_t end) { body(done + begin, done + end); };
  while (done < count) {
    const int threads = impl_->threads_for(count - done, grain, limit);
    if (threads <= 1) return alone(count - done, rest);
    if (const std::unique_lock call(impl_->calls, std::try_to_lock); call)
      return impl_->share_out(count - done, grain, threads, rest);
    const std::size_t now = std::min(std::max<std::size_t>(1, piece), count - done);
    alone(now, rest);
    done += now;
  }
}

namespace {
std::mutex shared_mutex;
std::unique_ptr<ThreadPool> shared_pool;
}  // namespace

ThreadPool& ThreadPool::shared() {
  const std::lock_guard lock(shared_mutex);
  if (!shared_pool) shared_pool = std::make_unique<ThreadPool>(default_size());
  return *shared_pool;
}

void ThreadPool::set_default_size(int size) {
  const int wanted = read_env().threads.value_or(size);
  ThreadPool* pool = nullptr;
  {
    const std::lock_guard lock(shared_mutex);
    if (shared_pool && shared_pool->impl_->is_forked()) static_cast<void>(shared_pool.release());
    if (!shared_pool) shared_pool = std::make_unique<ThreadPool>(wanted);
    pool = shared_pool.get();
  }
  pool->resize(wanted);  // called without the lock, because the loop that this waits for may ask for the pool
}

}  // namespace zcomm
