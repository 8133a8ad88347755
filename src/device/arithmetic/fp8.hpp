// Codes of fp8_e4m3: included once per instruction set, as device/convert_body.hpp.
//
// See [Note: encoded part] in zcomm/codec.hpp. A code is a sign, 4 bits of exponent (bias 7) and 3 of fraction; no
// infinity, and the code of NaN (127) is never written. Integer arithmetic and the adder, no tables.
#pragma once

#include "device/arithmetic/block_scale.hpp"

namespace zcomm::device::ZC_ISA {
namespace {

struct Fp8Code {
  static constexpr float kTop = 448.0f;
  static constexpr bool kPacked = false;
  static constexpr u32 kDropped = 20;               // fraction bits of f32 that a code lacks
  static constexpr u32 kBias = 120u << 3;           // f32's exponent bias of 127 -> 7, in the place of a code
  static constexpr u32 kLeastNormal = 121u << 23;   // bits of 2^-6
  static constexpr float kSmallUnits = 0x1.8p+14f;  // x + this has x in units of 2^-9, a subnormal's, in its low bits

  /// Code of a quotient of the element x, in the low byte of the result; the others are undefined. A sum with 2^20
  /// times the quotient's power of two (at least 2^-6) has the quotient in units of the code's last bit in its low
  /// bits: 8 to 16 of them, or fewer below 2^-6.
  static ZC_INLINE u32 nearest(float quotient, float x) {
    const u32 magnitude = bits_of(quotient) & 0x7fffffffu, power = magnitude & 0x7f800000u;
    const u32 least = power < kLeastNormal ? kLeastNormal : power, units = least + (kDropped << 23);
    const u32 sum = bits_of(float_of(magnitude) + float_of(units));
    return coded(x, (sum - units) + (least >> kDropped) - (kLeastNormal >> kDropped));
  }
  static ZC_INLINE u32 by_chance(float quotient, float x, u32 random) {
    const u32 magnitude = bits_of(quotient) & 0x7fffffffu;
    const u32 normal = ((magnitude + (random & 0xfffffu)) >> kDropped) - kBias;
    const u32 small = bits_of((float_of(magnitude) + rounding_chance(random) * 0x1p-9f) + kSmallUnits);
    return coded(x, magnitude < kLeastNormal ? small : normal);
  }
  static ZC_INLINE float value(u32 code) {
    const u32 bits = (code & 0x7fu) << kDropped;
    const u32 small = bits_of(float_of(bits + kLeastNormal) - float_of(kLeastNormal));  // exact
    const u32 magnitude = bits < (1u << 23) ? small : bits + (kBias << kDropped);
    return float_of(magnitude | (code & 0x80u) << 24);
  }

 private:
  static ZC_INLINE u32 coded(float x, u32 magnitude) { return (magnitude & 0x7fu) | (bits_of(x) >> 24 & 0x80u); }
};

}  // namespace
}  // namespace zcomm::device::ZC_ISA
