// Signals by Linux futex (coll/counter.hpp).
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

constexpr int kSpins = 1000;  // some 10 us: longer than a peer on its own CPU takes, shorter than a sleep costs twice
constexpr int kYields = 20;   // ranks that take turns on a CPU: each gives way until all have come

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

void publish(Signal& signal, std::uint32_t value) noexcept {
  signal.value.store(value, std::memory_order_seq_cst);
  if (signal.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(signal.value);
}

void wake(Signal& signal) noexcept { futex_wake(signal.value); }

Patience Patience::of(int ranks) {
  if (ranks <= usable_cpus()) return {kSpins, 0};
  return {0, kYields};
}

bool wait_awake(const Signal& signal, std::uint32_t target, Patience patience) noexcept {
  const auto is_reached = [&] { return reached(signal.value.load(std::memory_order_acquire), target); };
  if (is_reached()) return true;
  for (int i = 0; i < patience.spins; ++i) {
    pause_cpu();
    if (is_reached()) return true;
  }
  for (int i = 0; i < patience.yields; ++i) {
    sched_yield();
    if (is_reached()) return true;
  }
  return false;
}

bool wait_asleep(Signal& signal, std::uint32_t target, Clock::time_point until) noexcept {
  const auto left = until - Clock::now();
  signal.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = signal.value.load(std::memory_order_seq_cst);
  if (!reached(seen, target) && left > Clock::duration::zero()) futex_wait(signal.value, seen, left);
  signal.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return reached(signal.value.load(std::memory_order_acquire), target);
}

int usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace zcomm::coll
