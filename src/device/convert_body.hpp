// Conversions between f32/f64 and the 16-bit formats for one instruction set; see [Note: one definition].
//
// To nearest even, subnormals kept, NaN -> quiet NaN with a truncated payload, as VCVTPS2PH and VCVTNEPS2BF16 treat
// normal numbers. Uses integer arithmetic, so flush-to-zero modes of the calling thread do not matter. Included by
// files that define ZC_ISA (a namespace) and ZC_ISA_LEVEL (0 plain, 1 AVX2, 2 AVX-512, 3 AVX-512 BF16).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// (The maskz forms below with a full mask avoid a false warning of GCC 12 about the plain ones.)
#ifndef ZC_INLINE  // CUDA sources define their own
#define ZC_INLINE inline __attribute__((always_inline))
#endif

namespace zcomm::device::ZC_ISA {
namespace {

using std::size_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

ZC_INLINE u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
ZC_INLINE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }

ZC_INLINE float from_bf16(u16 x) { return float_of(static_cast<u32>(x) << 16); }

ZC_INLINE u16 to_bf16(float x) {
  const u32 bits = bits_of(x);
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32 quiet = (bits >> 16) | 0x40u;
  return static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

ZC_INLINE float from_f16(u16 x) {
  const u32 sign = static_cast<u32>(x & 0x8000u) << 16;
  const u32 magnitude = static_cast<u32>(x & 0x7fffu) << 13;
  const u32 normal = magnitude + (112u << 23);
  const u32 special = magnitude | 0x7f800000u | (magnitude > 0x0f800000u ? 0x400000u : 0u);
  const u32 subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));  // exact
  const u32 bits = magnitude >= 0x0f800000u ? special : magnitude < 0x00800000u ? subnormal : normal;
  return float_of(bits | sign);
}

ZC_INLINE u16 to_f16(float x) {
  const u32 sign = (bits_of(x) >> 16) & 0x8000u;
  const u32 bits = bits_of(x) & 0x7fffffffu;
  const u32 normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  // Adding 0.5 moves the last kept bit of a subnormal to the last place of the sum: the adder rounds it.
  const u32 subnormal = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
  const u32 special = bits > 0x7f800000u ? (0x7e00u | ((bits >> 13) & 0x3ffu)) : 0x7c00u;
  const u32 half = bits >= (143u << 23) ? special : bits < (113u << 23) ? subnormal : normal;
  return static_cast<u16>(half | sign);
}

/// f64 -> f32 rounded to odd: rounding the result again to a 16-bit format equals a single rounding.
ZC_INLINE float to_odd_f32(double x) {
  const float nearest = static_cast<float>(x);
  const double a = __builtin_fabs(static_cast<double>(nearest)), b = __builtin_fabs(x);
  const u32 below = bits_of(nearest) - (a > b ? 1u : 0u);
  return float_of(below | ((a > b) | (a < b) ? 1u : 0u));
}

inline void widen_f16(float* dst, const u16* src, size_t n) {
  size_t i = 0;
#if ZC_ISA_LEVEL >= 2
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(dst + i,
                     _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i))));
#elif ZC_ISA_LEVEL == 1
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
#endif
#pragma GCC ivdep
  for (; i < n; ++i) dst[i] = from_f16(src[i]);
}

inline void narrow_f16(u16* dst, const float* src, size_t n) {
  size_t i = 0;
#if ZC_ISA_LEVEL >= 2
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i),
                        _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(src + i), 0));
#elif ZC_ISA_LEVEL == 1
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), 0));
#endif
#pragma GCC ivdep
  for (; i < n; ++i) dst[i] = to_f16(src[i]);
}

inline void widen_bf16(float* dst, const u16* src, size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) dst[i] = from_bf16(src[i]);
}

inline void narrow_bf16(u16* dst, const float* src, size_t n) {
  size_t i = 0;
#if ZC_ISA_LEVEL >= 3
  for (; i + 16 <= n; i += 16) {
    const __m512 x = _mm512_loadu_ps(src + i);
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    const __m512i below_one = _mm512_sub_epi32(magnitude, _mm512_set1_epi32(1));  // zero wraps round
    if (__builtin_expect(_mm512_cmplt_epu32_mask(below_one, _mm512_set1_epi32(0x7fffff)) != 0, 0)) {
#pragma GCC ivdep
      for (size_t k = i; k < i + 16; ++k) dst[k] = to_bf16(src[k]);  // the instruction flushes subnormals
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), __builtin_bit_cast(__m256i, _mm512_cvtneps_pbh(x)));
    }
  }
#endif
#pragma GCC ivdep
  for (; i < n; ++i) dst[i] = to_bf16(src[i]);
}

}  // namespace
}  // namespace zcomm::device::ZC_ISA
