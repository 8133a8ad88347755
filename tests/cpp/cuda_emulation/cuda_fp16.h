// Replaces CUDA's header of this name when kernels are compiled for the host: conversions by definition, to nearest
// even, subnormals kept.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

struct __half {
  unsigned short bits;
};

inline __half __ushort_as_half(unsigned short x) { return {x}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }

inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const float sign = x.bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31)
    return fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  return sign * std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 1024),
                           (exponent == 0 ? 1 : exponent) - 25);
}

inline __half __float2half_rn(float x) {
  const int sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return {0x7fff};
  if (std::isinf(x)) return {static_cast<unsigned short>(sign | 0x7c00)};
  if (x == 0.0f) return {static_cast<unsigned short>(sign)};
  const int exponent = std::ilogb(x) < -14 ? -14 : std::ilogb(x);
  const long units = std::lrint(std::ldexp(std::fabs(static_cast<double>(x)), 10 - exponent));  // ties to even
  const long bits = units + (static_cast<long>(exponent + 14) << 10);  // a carry raises the exponent
  return {static_cast<unsigned short>(sign | (bits > 0x7c00 ? 0x7c00 : bits))};
}
