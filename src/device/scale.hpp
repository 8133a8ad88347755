// scale: dst = src * factor with a count of nonfinite results: unscaling, averaging and the overflow check in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/dtype.hpp"

namespace zcomm::device {

/// dst[i] = round(widen(src[i]) * factor), in f32; any pair of f32, bf16, f16. dst may be src if their types are equal;
/// no other overlap. more: if not null, multiplies the factor first (in f32): a scale that the device has computed.
/// nonfinite: incremented by the number of results that are infinite or NaN as stored.
struct Scale {
  void* dst;
  DType dst_dtype;
  const void* src;
  DType src_dtype;
  std::size_t count;
  float factor;
  const float* more = nullptr;
  std::uint64_t* nonfinite = nullptr;
};

/// Throws InvalidArgument: other dtypes, null with count > 0.
void check_scale(const Scale& args);

/// On host memory.
void scale(const Scale& args);

}  // namespace zcomm::device
