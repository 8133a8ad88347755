// sign for one instruction set: included by codec_body.hpp; see [Note: one definition].
#pragma once

#include "device/arithmetic/sign.hpp"
#include "device/cpu/codec_blocks.hpp"

namespace zcomm::device::ZC_ISA {
namespace {

ZC_INLINE bool bit_at(const u8* bits, size_t k) { return (bits[k / 8] >> (k % 8) & 1u) != 0; }

/// bits of n elements, from a multiple of 8 on: 1 if negative. The last byte is filled up with zeros.
inline void put_signs(u8* bits, const float* values, size_t n) {
  size_t k = 0;
#if ZC_ISA_LEVEL >= 2
  for (; k + 16 <= n; k += 16) {
    const __mmask16 negative = _mm512_cmp_ps_mask(_mm512_loadu_ps(values + k), _mm512_setzero_ps(), _CMP_LT_OQ);
    const u16 word = static_cast<u16>(negative);
    memcpy(bits + k / 8, &word, sizeof(word));
  }
#elif ZC_ISA_LEVEL == 1
  for (; k + 8 <= n; k += 8) {
    const __m256 negative = _mm256_cmp_ps(_mm256_loadu_ps(values + k), _mm256_setzero_ps(), _CMP_LT_OQ);
    bits[k / 8] = static_cast<u8>(_mm256_movemask_ps(negative));
  }
#elif defined(__x86_64__)
  for (; k + 8 <= n; k += 8) {
    const __m128 low = _mm_cmplt_ps(_mm_loadu_ps(values + k), _mm_setzero_ps());
    const __m128 high = _mm_cmplt_ps(_mm_loadu_ps(values + k + 4), _mm_setzero_ps());
    bits[k / 8] = static_cast<u8>(_mm_movemask_ps(low) | _mm_movemask_ps(high) << 4);
  }
#endif
  for (; k < n; k += 8) {
    u32 byte = 0;
    for (size_t j = k; j < k + 8 && j < n; ++j) byte |= (values[j] < 0.0f ? 1u : 0u) << (j - k);
    bits[k / 8] = static_cast<u8>(byte);
  }
}

/// values = scale, negative if the bit is 1.
inline void get_signs(float* values, const u8* bits, size_t n, float scale) {
  size_t k = 0;
#if ZC_ISA_LEVEL >= 2
  const __m512 positive = _mm512_set1_ps(scale), negative = _mm512_set1_ps(-scale);
  for (; k + 16 <= n; k += 16) {
    u16 word;
    memcpy(&word, bits + k / 8, sizeof(word));
    _mm512_storeu_ps(values + k, _mm512_mask_blend_ps(static_cast<__mmask16>(word), positive, negative));
  }
#elif ZC_ISA_LEVEL == 1
  const __m256i magnitude = _mm256_castps_si256(_mm256_set1_ps(scale));
  const __m256i to_top = _mm256_set_epi32(24, 25, 26, 27, 28, 29, 30, 31), top = _mm256_set1_epi32(-0x7fffffff - 1);
  for (; k + 8 <= n; k += 8) {
    const __m256i signs = _mm256_and_si256(_mm256_sllv_epi32(_mm256_set1_epi32(bits[k / 8]), to_top), top);
    _mm256_storeu_ps(values + k, _mm256_castsi256_ps(_mm256_xor_si256(magnitude, signs)));
  }
#endif
  for (; k < n; ++k) values[k] = bit_at(bits, k) ? -scale : scale;
}

/// Elements with the bit 0 in the mask become 0.
inline void apply_mask(float* values, const u8* mask, size_t n) {
  size_t k = 0;
#if ZC_ISA_LEVEL >= 2
  for (; k + 16 <= n; k += 16) {
    u16 word;
    memcpy(&word, mask + k / 8, sizeof(word));
    _mm512_storeu_ps(values + k, _mm512_maskz_loadu_ps(static_cast<__mmask16>(word), values + k));
  }
#endif
  for (; k < n; ++k) values[k] = bit_at(mask, k) ? values[k] : 0.0f;
}

/// The elements to encode, as read_block; masked ones are 0.
inline const float* read_masked(const EncodeCall& call, size_t begin, size_t n, Values& room) {
  const float* values = read_block(call, begin, n, room);
  if (call.mask == nullptr) return values;
  if (values != room.at) memcpy(room.at, values, n * sizeof(float));
  apply_mask(room.at, call.mask + begin / 8, n);
  return room.at;
}

/// See [Note: order of squares].
inline double sum_squares(const float* values, size_t n) {
  double sums[kSquareLanes] = {};
  size_t k = 0;
  for (; k + kSquareLanes <= n; k += kSquareLanes) {
#pragma GCC ivdep
    for (size_t j = 0; j < kSquareLanes; ++j) {
      const auto x = static_cast<double>(values[k + j]);
      sums[j] += x * x;
    }
  }
  for (size_t j = 0; k + j < n; ++j) {
    const auto x = static_cast<double>(values[k + j]);
    sums[j] += x * x;
  }
  for (size_t half = kSquareLanes / 2; half > 0; half /= 2)
    for (size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0];
}

inline u64 count_kept(const u8* mask, size_t n) {
  u64 kept = 0;
  for (size_t i = 0; i < n / 8; ++i) kept += static_cast<u64>(__builtin_popcount(mask[i]));
  if (n % 8 != 0) kept += static_cast<u64>(__builtin_popcount(mask[n / 8] & ((1u << n % 8) - 1u)));
  return kept;
}

void sign_squares(const EncodeCall& call) {
  for (size_t begin = call.begin; begin < call.end; begin += kBlock) {
    const size_t n = elements_of(begin, call.end);
    Values room;
    const double sum = sum_squares(read_masked(call, begin, n, room), n);
    const BlockSquares block{sum, call.mask == nullptr ? n : count_kept(call.mask + begin / 8, n)};
    memcpy(call.out.codes + begin / 8, &block, sizeof(block));
  }
}

void set_sign_scale(const Encoded& out, size_t count) {
  double sums[kTotalLanes] = {};
  u64 kept = 0;
  for (size_t b = 0; b * kBlock < count; ++b) {
    BlockSquares block;
    memcpy(&block, out.codes + b * kSignBytes, sizeof(block));
    sums[b % kTotalLanes] += block.sum;
    kept += block.count;
  }
  for (size_t half = kTotalLanes / 2; half > 0; half /= 2)
    for (size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  *out.scales = sign_scale(sums[0], kept);
}

void encode_signs(const EncodeCall& call) {
  const bool finite = *call.out.scales != kLostScale;
  const float scale = from_bf16(*call.out.scales);
  for (size_t begin = call.begin; begin < call.end; begin += kBlock) {
    const size_t n = elements_of(begin, call.end);
    Values room, decoded;
    const float* values = read_masked(call, begin, n, room);
    u8* bits = call.out.codes + begin / 8;
    put_signs(bits, values, n);
    if (!finite) memset(bits, 0, (n + 7) / 8);
    if (call.error == nullptr && call.base == nullptr) continue;
    get_signs(decoded.at, bits, n, scale);
    if (call.mask != nullptr) apply_mask(decoded.at, call.mask + begin / 8, n);
    finish_block(call, begin, values, decoded.at, n, finite);
  }
}

}  // namespace
}  // namespace zcomm::device::ZC_ISA
