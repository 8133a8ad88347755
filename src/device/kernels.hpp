// Element kernels on host memory: reduce, cast, in one rounding rule for every instruction set.
//
// The same arithmetic in the same order in vector body and tail, on AVX-512, AVX2, NEON and plain C++ (no fused
// multiply-add, no reassociation): results are equal to the bit everywhere (decision D3).
// Thread rule: pure functions; callers split work among threads (reduce_in_parts does it itself).
#pragma once

#include <cstddef>
#include <span>

#include "zcomm/dtype.hpp"

namespace zcomm::device {

/// How results are stored. streaming: non-temporal, for data that is not read soon; automatic: streaming for calls too
/// large for the cache. Callers that cut a large buffer into small calls set it, because they know the total.
enum class Stores { automatic, cached, streaming };
/// For a call that stores so many bytes.
bool wants_streaming(Stores stores, std::size_t nbytes);

/// dst[d][i] (+)= finish(src[0][i] op src[1][i] op ...), sources in the order given, for each d.
///
/// f16/bf16 accumulate in f32 and round once (to nearest even); f32, f64 and integers accumulate in their own type. avg
/// divides the sum by src.size() (correctly rounded; InvalidArgument for integer types). Integers wrap around; bool:
/// sum and max are or, prod and min are and. `out` is `in`, or f32 when `in` is f16/bf16. accumulate adds the rounded
/// result to the contents of dst, whatever the op (one more rounding; bool: or). dst[d] may equal any src[s]; partial
/// overlap is not allowed. min/max propagate NaN like torch. `stores` is a hint: ignored with accumulate and when a dst
/// is a src. `remote` is also a hint: the number of sources on other devices. Few blocks keep their link busy, so that
/// the rest of the device can compute. Throws InvalidArgument.
struct Reduce {
  std::span<void* const> dst;
  std::span<const void* const> src;
  std::size_t count;
  DType in;
  DType out;
  ReduceOp op;
  bool accumulate = false;
  Stores stores = Stores::automatic;
  int remote = 0;
};
void reduce(const Reduce& args);
/// The same; a large one runs on several threads of the core's pool while the pool is idle, because one thread does not
/// saturate the memory of a machine with many cores. Not from inside of a loop of the pool.
void reduce_in_parts(const Reduce& args);

/// dst[i] = convert(src[i]); any pair of f32, f64, f16, bf16. Rounds to nearest even; NaN stays NaN (quiet).
void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count);

/// memcpy for large blocks, with non-temporal stores when they pay. No overlap.
void copy(void* dst, const void* src, std::size_t nbytes, Stores stores = Stores::automatic);

}  // namespace zcomm::device
