// Signals by Linux futex (coll/signal.hpp).
#include "coll/signal.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

#include "base/fault.hpp"

namespace zcomm::coll {
namespace {

// A look costs a few ns, a pause 10 to 40 ns, a yield 0.3 us and more. A sleep costs several us, and 50 us if an idle
// CPU of a virtual machine must be woken: too much in a pipeline with steps of 25 us.
constexpr int kLooks = 200;
constexpr int kPauses = 200;       // some 5 us: a peer with a CPU of its own, in the interpreter between two calls
constexpr int kYieldsAlone = 200;  // some 100 us more, while other threads may run
constexpr int kYieldsShared = 20;  // ranks share a CPU: each yields until all have arrived

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
  fault_point();
  signal.value.store(value, std::memory_order_seq_cst);
  if (signal.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(signal.value);
}

void wake(Signal& signal) noexcept { futex_wake(signal.value); }

Patience Patience::of(int ranks, int cpus) {
  return ranks <= cpus ? Patience{kPauses, kYieldsAlone} : Patience{0, kYieldsShared};
}

namespace {

bool is_reached(const Signal& signal, std::uint32_t target) {
  return reached(signal.value.load(std::memory_order_acquire), target);
}

}  // namespace

bool wait_awake(const Signal& signal, std::uint32_t target, Patience patience) noexcept {
  // First without pauses: if all ranks arrive together, one pause is longer than the remaining wait.
  const int looks = patience.pauses > 0 ? kLooks : 1;
  for (int i = 0; i < looks; ++i)
    if (is_reached(signal, target)) return true;
  for (int i = 0; i < patience.pauses; ++i) {
    pause_cpu();
    if (is_reached(signal, target)) return true;
  }
  for (int i = 0; i < patience.yields; ++i) {
    sched_yield();
    if (is_reached(signal, target)) return true;
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

void fetch_for_writing(const void* line) noexcept {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));  // the built-in needs a newer baseline
#else
  __builtin_prefetch(line, 1);
#endif
}

CpuMask usable_cpus() {
  CpuMask mask{};
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {  // more than 1024 CPUs
    mask.fill(~std::uint64_t{0});
    return mask;
  }
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE && cpu < mask.size() * 64; ++cpu)
    if (CPU_ISSET(cpu, &set)) mask[cpu / 64] |= std::uint64_t{1} << (cpu % 64);
  return mask;
}

}  // namespace zcomm::coll
