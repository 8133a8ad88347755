// The scale of sign: included once per instruction set, as device/convert_body.hpp.
//
// [Note: order of squares] Squares are exact in f64 and are added in one order, whatever the threads, the instruction
// set or the device. A block of 256 has 32 sums: sum j adds elements j, j + 32, ... j + 224 in this order. Then the
// upper half of the sums is added to the lower half until one is left. Blocks have 256 sums in the same way: sum j adds
// blocks j, j + 256, ..., then halves. Until the scale is known, a block's sum waits in the bytes of its codes.
#pragma once

#include "device/arithmetic/block_scale.hpp"

namespace zcomm::device::ZC_ISA {
namespace {

constexpr u32 kSquareLanes = 32, kTotalLanes = 256;
constexpr std::size_t kSignBytes = 32;  // codes of a block

/// count: elements that the mask keeps.
struct BlockSquares {
  double sum;
  u64 count;
};

/// sqrt(total / count) as bf16; NaN if that is not finite.
ZC_INLINE u16 sign_scale(double total, u64 count) {
  const double mean = count == 0 ? 0.0 : total / static_cast<double>(count);
  const float root = static_cast<float>(__builtin_sqrt(mean));
  const u16 scale = to_bf16(root);
  return (scale & 0x7f80u) == 0x7f80u ? kLostScale : scale;
}

}  // namespace
}  // namespace zcomm::device::ZC_ISA
