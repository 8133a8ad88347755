// scale: dst = src * factor with a count of what is not finite: unscaling, averaging and the overflow check in one
// pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/dtype.hpp"

namespace zcomm::device {

/// dst[i] = round(widen(src[i]) * factor), in f32; any pair of f32, bf16, f16. dst may be src where their types are
/// equal; no other overlap. more: the factor is multiplied by it first (in f32), where it is not null: a scale that the
/// device has computed. nonfinite: the number of results that are infinite or NaN as stored is added to it.
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
