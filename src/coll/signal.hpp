// Signal: a 32-bit number in shared memory with one writer, and sleeping until it reaches a value.
//
// Invariants: values only grow (modulo 2^32); a Counter has a cache-line pair to itself. Publishing and going to sleep
// are Dekker's two sides: writer stores value then reads sleepers, waiter adds to sleepers then reads value, all
// sequentially consistent, so a wake-up is never lost and no system call is made while no thread sleeps. A waiter first
// spins if each rank has a CPU of its own, then yields to other ready threads, then sleeps. Thread rule: one writer per
// signal; any number of waiters in any process that maps it (shared futex).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace zcomm::coll {

using Clock = std::chrono::steady_clock;

struct Signal {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};
};
struct alignas(128) Counter : Signal {};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "shared memory needs address-free atomics");
static_assert(sizeof(Counter) == 128);

/// Whether `value` is at or past `target`, wrap-around included.
constexpr bool reached(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}

/// Stores `value` and wakes the threads that sleep on it.
void publish(Signal& signal, std::uint32_t value) noexcept;

/// Wakes sleepers without a new value, so that they look around (failure, shutdown).
void wake(Signal& signal) noexcept;

/// How to wait before sleeping: busy for `pauses` pauses, then `yields` yields of the CPU.
struct Patience {
  int pauses = 0;
  int yields = 0;

  /// For `ranks` ranks that share `cpus` CPUs.
  static Patience of(int ranks, int cpus);
};

/// Waits without sleeping, first busily, then yielding; true if `target` is reached.
bool wait_awake(const Signal& signal, std::uint32_t target, Patience patience) noexcept;

/// Sleeps until `target` is reached, `until` has passed, or a spurious wake-up; true if reached.
bool wait_asleep(Signal& signal, std::uint32_t target, Clock::time_point until) noexcept;

/// Prefetches a cache line that will be written soon; a useless prefetch costs nothing.
void fetch_for_writing(const void* line) noexcept;

/// The CPUs that this process may use, the first 1024 of them, as bits.
using CpuMask = std::array<std::uint64_t, 16>;
CpuMask usable_cpus();

}  // namespace zcomm::coll
