// Ping-pong and token ring (bench/cpp/line.hpp).
#include "line.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <limits>

namespace zcomm::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPatience = std::chrono::seconds(10);

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Spins; yields now and then, so that it ends even if the other rank has no core at the moment.
bool spin_until(const std::atomic<std::uint32_t>& value, std::uint32_t target, Clock::time_point deadline) {
  for (;;) {
    for (int i = 0; i < 20'000; ++i) {
      if (value.load(std::memory_order_acquire) == target) return true;
      pause_cpu();
    }
    if (Clock::now() > deadline) return false;
    ::sched_yield();
  }
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

double line_round_trip_s(Word& line, int rank, int laps) {
  if (rank > 1) return 0;
  auto& value = line.value;
  // Even numbers are rank 1's answers. Both ranks start from the same even number: neither has moved yet.
  const std::uint32_t base = value.load(std::memory_order_acquire) & ~1u;
  const auto begin = Clock::now();
  for (std::uint32_t lap = 0; lap < static_cast<std::uint32_t>(laps); ++lap) {
    const std::uint32_t ask = base + 2 * lap + 1, answer = ask + 1;
    if (rank == 0) value.store(ask, std::memory_order_release);
    if (!spin_until(value, rank == 0 ? answer : ask, begin + kPatience))
      return std::numeric_limits<double>::quiet_NaN();
    if (rank == 1) value.store(answer, std::memory_order_release);
  }
  return seconds_since(begin) / laps;
}

double futex_hop_s(Word* words, int rank, int world_size, int laps, std::uint32_t& done) {
  auto& own = words[rank].value;
  auto& next = words[(rank + 1) % world_size].value;
  const timespec second{1, 0};
  const std::uint32_t base = done;
  const auto begin = Clock::now();
  const auto pass = [&] {
    next.fetch_add(1, std::memory_order_seq_cst);
    futex(next, FUTEX_WAKE, 1, nullptr);
  };
  for (std::uint32_t lap = 1; lap <= static_cast<std::uint32_t>(laps); ++lap) {
    if (rank == 0) pass();
    for (std::uint32_t seen; (seen = own.load(std::memory_order_seq_cst)) != base + lap;) {
      futex(own, FUTEX_WAIT, seen, &second);
      if (Clock::now() > begin + kPatience) return std::numeric_limits<double>::quiet_NaN();
    }
    if (rank != 0) pass();
  }
  done += static_cast<std::uint32_t>(laps);
  return seconds_since(begin) / laps / world_size;
}

}  // namespace zcomm::bench
