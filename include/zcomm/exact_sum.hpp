// ExactSum: a sum of doubles; its bits do not depend on the order of the terms (decision D3).
//
// [Note: gradient norm] The squares of 64 consecutive elements of the flat index are summed in f64 in a fixed order;
// these block sums are added here exactly, in a fixed-point number wide enough for every double. Shards and buckets
// begin at multiples of 64 elements, so neither stage, bucket size nor world size changes the result. The words are
// int64 with spare high bits, so a plain integer all_reduce(sum) adds the accumulators of all ranks.
// Source: Kulisch accumulator; Demmel & Nguyen, "Parallel reproducible summation" (2015).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "zcomm/dtype.hpp"

namespace zcomm {

inline constexpr std::size_t kNormBlock = 64;  ///< elements per block; every tensor and shard starts on a multiple

class ExactSum {
 public:
  /// 69 32-bit digits in int64 words, lowest first (66 cover every double, the rest is for carries), then a count of
  /// non-finite terms.
  static constexpr std::size_t kWords = 70;

  void clear();
  void add(double term);  ///< of either sign; non-finite terms are counted, not added
  void add(ExactSum other);
  double value() const;  ///< rounded once, to nearest; NaN if a non-finite term was added
  void normalize();      ///< carries: call before words() travel, so that 2^20 of them can be added
  std::span<std::int64_t> words() { return words_; }

 private:
  std::int64_t words_[kWords] = {};
  std::uint32_t pending_ = 0;  ///< additions since the last carry
};

/// Adds the squares of grad[0, count) to `sum`, block by block; the last block may be short. f32, bf16 or f16. Inside a
/// block lane j of 16 adds the squares of elements j, j + 16, j + 32, j + 48 in that order; then lanes j and j + 8, j +
/// 4, j + 2, j + 1 are added. Large arrays are divided among the core's pool. Not from inside a loop of the pool.
/// Throws InvalidArgument for other dtypes.
void add_squares(ExactSum& sum, const void* grad, DType dtype, std::size_t count);

}  // namespace zcomm
