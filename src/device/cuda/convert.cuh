// Conversions between f32/f64 and the 16-bit formats on the device, with the bits of device/convert_body.hpp.
//
// The hardware's conversions round the same way but map every NaN to one; here NaN keeps its payload, as on the host.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace zcomm::device::cuda {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

__device__ inline bool is_nan_bits(u32 bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

__device__ inline float from_bf16(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

__device__ inline u16 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (is_nan_bits(bits)) return static_cast<u16>((bits >> 16) | 0x40u);
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ inline float from_f16(u16 x) {
  const u32 sign = static_cast<u32>(x & 0x8000u) << 16, magnitude = x & 0x7fffu;
  if (magnitude > 0x7c00u) return __uint_as_float(sign | 0x7fc00000u | (magnitude << 13));
  return __half2float(__ushort_as_half(x));
}

__device__ inline u16 to_f16(float x) {
  const u32 bits = __float_as_uint(x);
  if (is_nan_bits(bits)) return static_cast<u16>((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu));
  return __half_as_ushort(__float2half_rn(x));
}

__device__ inline float f64_to_f32(double x) {
  const u64 bits = static_cast<u64>(__double_as_longlong(x));
  if (x != x)
    return __uint_as_float(static_cast<u32>(bits >> 32 & 0x80000000u) | 0x7fc00000u |
                           static_cast<u32>(bits >> 29 & 0x3fffffu));
  return __double2float_rn(x);
}

__device__ inline double f32_to_f64(float x) {
  const u64 bits = __float_as_uint(x);
  if (x != x)
    return __longlong_as_double(
        static_cast<long long>((bits & 0x80000000u) << 32 | 0x7ff8000000000000u | (bits & 0x3fffffu) << 29));
  return static_cast<double>(x);
}

/// Rounded to odd: rounding again to a 16-bit format equals a single rounding.
__device__ inline float to_odd_f32(double x) {
  if (x != x) return f64_to_f32(x);
  const float cut = __double2float_rz(x);
  return static_cast<double>(cut) == x ? cut : __uint_as_float(__float_as_uint(cut) | 1u);
}

}  // namespace zcomm::device::cuda
