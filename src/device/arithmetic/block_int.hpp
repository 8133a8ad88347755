// Codes of block_int: included once per instruction set, as device/convert_body.hpp.
//
// See [Note: encoded part] in zcomm/codec.hpp. A quotient is at most kTop: the scale is not below largest / kTop, and
// kTop times a bf16 number is exact.
#pragma once

#include "device/arithmetic/block_scale.hpp"

namespace zcomm::device::ZC_ISA {
namespace {

constexpr float kWhole = 0x1.8p+23f;  // x + kWhole has rint(x) in its low bits; the adder rounds to nearest even

struct Int8Code {
  static constexpr float kTop = 127.0f;
  static constexpr bool kPacked = false;
  /// Code of a quotient of the element x, in the low byte of the result; the others are undefined.
  static ZC_INLINE u32 nearest(float quotient, float) { return bits_of(quotient + kWhole); }
  static ZC_INLINE u32 by_chance(float quotient, float x, u32 random) {
    return nearest(quotient + rounding_chance(random), x);
  }
  static ZC_INLINE float value(u32 code) { return static_cast<float>(static_cast<std::int8_t>(code)); }
};

/// Two codes in a byte (kPacked); only the low 4 bits of a code count.
struct Int4Code {
  static constexpr float kTop = 7.0f;
  static constexpr bool kPacked = true;
  static ZC_INLINE u32 nearest(float quotient, float) { return bits_of(quotient + kWhole); }
  static ZC_INLINE u32 by_chance(float quotient, float x, u32 random) {
    return nearest(quotient + rounding_chance(random), x);
  }
  static ZC_INLINE float value(u32 code) { return static_cast<float>(static_cast<std::int32_t>(code << 28) >> 28); }
};

}  // namespace
}  // namespace zcomm::device::ZC_ISA
