// Latency: durations of requests, as counts in buckets an eighth of an octave wide, from which percentiles are read.
//
// Thread rule: one thread records, any thread reads (relaxed counters: a summary may miss the newest few).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "zcomm/swap_file.hpp"

namespace zcomm::mem {

class LatencyHistogram {
 public:
  void record(std::chrono::nanoseconds took) {
    const auto ns = static_cast<std::uint64_t>(std::max<std::int64_t>(took.count(), 0));
    counts_[bucket_of(ns)].fetch_add(1, std::memory_order_relaxed);
    if (ns > max_ns_.load(std::memory_order_relaxed)) max_ns_.store(ns, std::memory_order_relaxed);
  }

  /// Percentiles are the upper ends of their buckets (at most 1/8 too long), and never beyond the longest.
  SwapFile::Latency summary() const {
    std::array<std::uint64_t, kBuckets> counts{};
    SwapFile::Latency latency{};
    for (std::size_t i = 0; i < kBuckets; ++i) latency.count += counts[i] = counts_[i].load(std::memory_order_relaxed);
    latency.max_s = static_cast<double>(max_ns_.load(std::memory_order_relaxed)) * 1e-9;
    const auto at = [&](std::uint64_t percent) {
      const std::uint64_t rank = (latency.count * percent + 99) / 100;
      std::uint64_t seen = 0;
      for (std::size_t i = 0; i < kBuckets; ++i) {
        seen += counts[i];
        if (seen >= rank && seen > 0) return std::min(static_cast<double>(end_of(i)) * 1e-9, latency.max_s);
      }
      return 0.0;
    };
    latency.p50_s = at(50);
    latency.p90_s = at(90);
    latency.p99_s = at(99);
    return latency;
  }

 private:
  // Below 2^kFirst ns all is one bucket; beyond 2^kLast ns (18 minutes), too.
  static constexpr unsigned kFirst = 9, kLast = 40, kSplit = 8;
  static constexpr std::size_t kBuckets = std::size_t{kLast - kFirst} * kSplit + 2;

  static std::size_t bucket_of(std::uint64_t ns) {
    if (ns < std::uint64_t{1} << kFirst) return 0;
    if (ns >= std::uint64_t{1} << kLast) return kBuckets - 1;
    const unsigned octave = static_cast<unsigned>(std::bit_width(ns)) - 1;
    return 1 + std::size_t{octave - kFirst} * kSplit + ((ns >> (octave - 3)) & (kSplit - 1));
  }

  static std::uint64_t end_of(std::size_t bucket) {
    if (bucket == 0) return std::uint64_t{1} << kFirst;
    if (bucket == kBuckets - 1) return UINT64_MAX;
    const std::size_t octave = kFirst + (bucket - 1) / kSplit;
    return ((bucket - 1) % kSplit + kSplit + 1) << (octave - 3);
  }

  std::array<std::atomic<std::uint64_t>, kBuckets> counts_{};
  std::atomic<std::uint64_t> max_ns_{0};
};

}  // namespace zcomm::mem
