// Scales of blocks, and chances for their codes: included once per instruction set, as device/convert_body.hpp.
//
// See [Note: encoded part] in zcomm/codec.hpp.
#pragma once

#include "device/arithmetic/counter_hash.hpp"

namespace zcomm::device::ZC_ISA {
namespace {

constexpr u32 kMostCoded = 0x7f700000u;   // 15/16 of 2^128: a code times a scale that was rounded up stays finite
constexpr float kLeastScale = 0x1p-118f;  // codes times scales are multiples of 2^-134: exact
constexpr u16 kLostScale = 0x7fc0u;       // NaN

/// largest: bits of a block's largest magnitude. top: value of the highest code.
ZC_INLINE u16 block_scale(u32 largest, float top) {
  const float exact = float_of(largest) / top;
  const u32 up = (bits_of(exact < kLeastScale ? kLeastScale : exact) + 0xffffu) >> 16;
  return static_cast<u16>(largest >= kMostCoded ? kLostScale : up);
}

/// Added before rounding to nearest, it rounds up with the right chance: an odd multiple of 2^-17 in (-1/2, 1/2), so
/// that integers keep their value.
ZC_INLINE float rounding_chance(u32 random) {
  const auto odd = static_cast<std::int32_t>((random & 0xffffu) * 2u + 1u) - 65536;
  return static_cast<float>(odd) * 0x1p-17f;
}

}  // namespace
}  // namespace zcomm::device::ZC_ISA
