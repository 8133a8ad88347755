// Element kernels on host memory: reduce, cast, in one rounding rule for every instruction set.
//
// The same arithmetic in the same order in vector body and tail, on AVX-512, AVX2, NEON and plain C++ (no fused
// multiply-add, no reassociation): results are equal to the bit everywhere (decision D3).
// Thread rule: pure functions; callers split work among threads.
#pragma once

#include <cstddef>
#include <span>

#include "zcomm/dtype.hpp"

namespace zcomm::device {

/// dst[d][i] (+)= finish(src[0][i] op src[1][i] op ...), sources in the order given, for each d.
///
/// f16/bf16 accumulate in f32 and round once (to nearest even); f32, f64 and integers accumulate in their own type.
/// avg divides the sum by src.size() (correctly rounded; InvalidArgument for integer types).
/// `out` is `in`, or f32 when `in` is f16/bf16. accumulate adds the result to what dst holds (one more rounding).
/// dst[d] may equal any src[s]; partial overlap is not allowed. min/max propagate NaN like torch.
struct Reduce {
  std::span<void* const> dst;
  std::span<const void* const> src;
  std::size_t count;
  DType in;
  DType out;
  ReduceOp op;
  bool accumulate = false;
};
void reduce(const Reduce& args);

/// dst[i] = convert(src[i]); any pair of f32, f64, f16, bf16. Rounds to nearest even; NaN stays NaN (quiet).
void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count);

/// memcpy for large blocks: non-temporal stores where they pay.
void copy(void* dst, const void* src, std::size_t nbytes);

}  // namespace zcomm::device
