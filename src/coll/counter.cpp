// Counter by Linux futex (coll/counter.hpp).
#include "coll/counter.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <thread>

namespace zcomm::coll {
namespace {

// No FUTEX_PRIVATE_FLAG: the waiter may be another process, or another mapping of the same page.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds timeout) noexcept {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(timeout.count() / 1'000'000'000);
  limit.tv_nsec = static_cast<long>(timeout.count() % 1'000'000'000);
  // EAGAIN (value changed), EINTR, ETIMEDOUT: the caller looks again in each case.
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void pause_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void publish(Counter& counter, std::uint32_t value) noexcept {
  counter.value.store(value, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(counter.value);
}

void wake(Counter& counter) noexcept { futex_wake(counter.value); }

bool wait_until(Counter& counter, std::uint32_t target, int spin_us, Clock::time_point until) noexcept {
  const auto is_reached = [&] { return reached(counter.value.load(std::memory_order_acquire), target); };
  if (is_reached()) return true;
  if (spin_us > 0) {
    const auto spin_end = std::min(until, Clock::now() + std::chrono::microseconds(spin_us));
    do {
      for (int i = 0; i < 32; ++i) {
        pause_cpu();
        if (is_reached()) return true;
      }
    } while (Clock::now() < spin_end);
  }
  const auto left = until - Clock::now();
  if (left <= Clock::duration::zero()) return is_reached();
  counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = counter.value.load(std::memory_order_seq_cst);
  if (!reached(seen, target)) futex_wait(counter.value, seen, left);
  counter.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return is_reached();
}

int usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace zcomm::coll
