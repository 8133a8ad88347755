// A block of elements in all codecs: reading, codes and their values, error feedback, rotation. Included by
// codec_body.hpp once per instruction set, as loops that the compiler vectorises; see [Note: one definition].
#pragma once

#include "device/arithmetic/block_int.hpp"
#include "device/cpu/codec_table.hpp"
#include "device/cpu/stores_body.hpp"

namespace zcomm::device::ZC_ISA {
namespace {

using u8 = std::uint8_t;
constexpr size_t kBlock = kCodecBlock;
constexpr size_t kTurn = 32;  // elements that a rotation mixes

// For a loop over a block that several codecs call: inlined everywhere, they are a quarter of a megabyte for each
// instruction set.
#define ZC_SHARED __attribute__((noinline))

/// The elements of a block, as f32.
struct alignas(64) Values {
  float at[kBlock];
};

/// Elements of the block at `begin`. The compiler does not see that they are at most kBlock: otherwise it unrolls every
/// loop over a block completely.
ZC_INLINE size_t elements_of(size_t begin, size_t end) {
  size_t n = end - begin < kBlock ? end - begin : kBlock;
  asm("" : "+r"(n));
  return n;
}

// -- Elements in memory: f32, bf16, f16

ZC_INLINE float widened(float x) { return x; }
ZC_INLINE float widened(u16 x) { return from_bf16(x); }

/// Elements [begin, begin + n); in `room` if they are not f32 in memory.
ZC_SHARED inline const float* read(const void* data, DType dtype, size_t begin, size_t n, Values& room) {
  if (dtype == DType::float32) return static_cast<const float*>(data) + begin;
  const u16* narrow = static_cast<const u16*>(data) + begin;
  dtype == DType::bfloat16 ? widen_bf16(room.at, narrow, n) : widen_f16(room.at, narrow, n);
  return room.at;
}

ZC_SHARED inline void write(void* data, DType dtype, size_t begin, const float* values, size_t n) {
  if (dtype == DType::float32) {
    memcpy(static_cast<float*>(data) + begin, values, n * sizeof(float));
    return;
  }
  u16* narrow = static_cast<u16*>(data) + begin;
  dtype == DType::bfloat16 ? narrow_bf16(narrow, values, n) : narrow_f16(narrow, values, n);
}

// -- Codes

/// Bits of the largest magnitude; signed, because SSE2 compares only signed numbers.
ZC_SHARED inline u32 largest_of(const float* values, size_t n) {
  std::int32_t largest = 0;
#pragma GCC unroll 4
  for (size_t k = 0; k < n; ++k) {
    const auto magnitude = static_cast<std::int32_t>(bits_of(values[k]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<u32>(largest);
}

/// Of bf16 numbers.
ZC_SHARED inline u32 largest_of(const u16* values, size_t n) {
  std::int16_t largest = 0;
  for (size_t k = 0; k < n; ++k) {
    const auto magnitude = static_cast<std::int16_t>(values[k] & 0x7fffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<u32>(largest) << 16;
}

/// x / scale, correctly rounded.
struct Divisor {
  float scale;
  ZC_INLINE float quotient(float x) const { return x / scale; }
};

#if ZC_ISA_LEVEL >= 2
/// The same without the divider, which takes three times as long: the product with the inverse is corrected by its
/// remainder, which is exact. Correct to the bit because the scale has 8 significant bits (tested on all of them), if
/// it is large enough for the remainder of a quotient that has a code other than 0; a zero may have the other sign.
/// Source: Markstein, "IA-64 and Elementary Functions" (2000).
struct FastDivisor {
  float scale, inverse;
  ZC_INLINE float quotient(float x) const {
    const float near = x * inverse;
    return __builtin_fmaf(__builtin_fmaf(-near, scale, x), inverse, near);
  }
};
constexpr float kLeastFastScale = 0x1p-100f;
#endif

/// Replaces a RoundingKey: to nearest.
struct Nearest {};

template <class Code>
ZC_INLINE u32 code_of(float quotient, float x, u32, Nearest) {
  return Code::nearest(quotient, x);
}
template <class Code>
ZC_INLINE u32 code_of(float quotient, float x, u32 k, RoundingKey key) {
  return Code::by_chance(quotient, x, random_bits(k, key));
}

/// n codes, one a byte. In: float, or u16 for bf16.
template <class Code, class In, class Key, class Division>
ZC_SHARED void make_codes_by(u8* codes, const In* values, size_t n, Division division, Key key) {
#pragma GCC ivdep
  for (size_t k = 0; k < n; ++k) {
    const float x = widened(values[k]);
    codes[k] = static_cast<u8>(code_of<Code>(division.quotient(x), x, static_cast<u32>(k), key));
  }
}
template <class Code, class In, class Key>
void make_codes(u8* codes, const In* values, size_t n, float scale, Key key) {
#if ZC_ISA_LEVEL >= 2
  if (scale >= kLeastFastScale) return make_codes_by<Code>(codes, values, n, FastDivisor{scale, 1.0f / scale}, key);
#endif
  make_codes_by<Code>(codes, values, n, Divisor{scale}, key);
}

/// A block's codes as they are in memory.
template <class Code, class In, class Key>
void put_codes(u8* codes, const In* values, size_t n, float scale, Key key) {
  if constexpr (!Code::kPacked) return make_codes<Code>(codes, values, n, scale, key);
  u8 all[kBlock];
  make_codes<Code>(all, values, n, scale, key);
  for (size_t k = n; k < kBlock; ++k) all[k] = 0;
  const size_t nbytes = n < kBlock / 2 ? n : kBlock / 2;
#pragma GCC ivdep
  for (size_t k = 0; k < nbytes; ++k) codes[k] = static_cast<u8>((all[k] & 15u) | all[k + kBlock / 2] << 4);
}

template <class Code>
size_t codes_nbytes(size_t n) {
  return Code::kPacked && n > kBlock / 2 ? kBlock / 2 : n;
}

/// values (+)= codes * scale.
template <bool add>
ZC_INLINE void put_value(float& to, float value) {
  to = add ? to + value : value;
}
template <class Code, bool add>
ZC_SHARED void get_values(float* values, const u8* codes, size_t n, float scale) {
  const size_t low = Code::kPacked && n > kBlock / 2 ? kBlock / 2 : n;
#pragma GCC ivdep
  for (size_t k = 0; k < low; ++k) put_value<add>(values[k], Code::value(codes[k]) * scale);
  if constexpr (Code::kPacked) {
    float* const high = values + kBlock / 2;
#pragma GCC ivdep
    for (size_t k = 0; k + kBlock / 2 < n; ++k) put_value<add>(high[k], Code::value(codes[k] >> 4u) * scale);
  }
}

// -- Error feedback: [Note: error feedback] in device/codec.hpp

/// Elements [begin, begin + n) of the error, begin at a block; in `room` if they are not f32 in memory.
ZC_SHARED inline const float* read_error(const EncodeCall& call, size_t begin, size_t n, Values& room) {
  if (call.error_dtype != DType::int8) return read(call.error, call.error_dtype, begin, n, room);
  const float scale = from_bf16(call.error_scales[begin / kBlock]);
  get_values<Int8Code, false>(room.at, static_cast<const u8*>(call.error) + begin, n, scale);
  return room.at;
}

ZC_SHARED inline void write_error(const EncodeCall& call, size_t begin, const float* values, size_t n) {
  if (call.error_dtype != DType::int8) return write(call.error, call.error_dtype, begin, values, n);
  const u16 scale = block_scale(largest_of(values, n), Int8Code::kTop);
  call.error_scales[begin / kBlock] = scale;
  put_codes<Int8Code>(static_cast<u8*>(call.error) + begin, values, n, from_bf16(scale), Nearest{});
}

/// to = a + b or a - b, each f32 or bf16: in registers, because a block that is widened first waits longer for memory.
template <bool add, class A, class B>
ZC_SHARED void combine(float* to, const A* a, const B* b, size_t n) {
#pragma GCC ivdep
  for (size_t k = 0; k < n; ++k) to[k] = add ? widened(a[k]) + widened(b[k]) : widened(a[k]) - widened(b[k]);
}
template <bool add, class A>
void combine_with(float* to, const A* a, const void* data, DType dtype, size_t begin, size_t n) {
  if (dtype == DType::bfloat16) return combine<add>(to, a, static_cast<const u16*>(data) + begin, n);
  Values room;
  combine<add>(to, a, read(data, dtype, begin, n, room), n);
}

template <class In>
const float* add_error(const EncodeCall& call, const In* values, size_t begin, size_t n, Values& room) {
  if (call.error_dtype == DType::int8) {
    Values error;
    combine<true>(room.at, values, read_error(call, begin, n, error), n);
  } else {
    combine_with<true>(room.at, values, call.error, call.error_dtype, begin, n);
  }
  return room.at;
}

/// The elements to encode: values - base + error.
template <class In>
const float* adjust_block(const EncodeCall& call, const In* values, size_t begin, size_t n, Values& room) {
  if (call.base != nullptr) {
    combine_with<false>(room.at, values, call.base, call.base_dtype, begin, n);
    return call.error == nullptr ? room.at : add_error(call, room.at, begin, n, room);
  }
  return add_error(call, values, begin, n, room);
}

/// The elements to encode: in - base + error.
ZC_SHARED inline const float* read_block(const EncodeCall& call, size_t begin, size_t n, Values& room) {
  if (call.base == nullptr && call.error == nullptr) return read(call.in, call.in_dtype, begin, n, room);
  if (call.in_dtype == DType::bfloat16)
    return adjust_block(call, static_cast<const u16*>(call.in) + begin, begin, n, room);
  return adjust_block(call, read(call.in, call.in_dtype, begin, n, room), begin, n, room);
}

/// error and base of a block. decoded: NaN everywhere if the block is not `finite`.
ZC_SHARED inline void finish_block(const EncodeCall& call, size_t begin, const float* values, const float* decoded,
                                   size_t n, bool finite) {
  if (call.error != nullptr) {
    Values room, next;
    if (!finite) {
      for (size_t k = 0; k < n; ++k) next.at[k] = 0.0f;
    } else if (call.keep == 0.0f) {
#pragma GCC ivdep
      for (size_t k = 0; k < n; ++k) next.at[k] = values[k] - decoded[k];
    } else {
      const float* error = read_error(call, begin, n, room);
      const float keep = call.keep, gain = 1.0f - call.keep;
#pragma GCC ivdep
      for (size_t k = 0; k < n; ++k) next.at[k] = keep * error[k] + gain * (values[k] - decoded[k]);
    }
    write_error(call, begin, next.at, n);
  }
  if (call.base != nullptr) {
    Values room, next;
    const float* base = read(call.base, call.base_dtype, begin, n, room);
#pragma GCC ivdep
    for (size_t k = 0; k < n; ++k) next.at[k] = base[k] + decoded[k];
    write(call.base, call.base_dtype, begin, next.at, n);
  }
}

// -- Rotation: [Note: rotation] in zcomm/codec.hpp. A stage of 32 elements leaves the results of positions 2 i and 2 i
// + 1 at i and i + 16, so the next stage finds the next bit of a position in its place, and after five stages each
// position is its own.

#if ZC_ISA_LEVEL >= 2

/// n: a multiple of 32. to may be from.
ZC_SHARED inline void turn(float* to, const float* from, size_t n) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  for (size_t k = 0; k < n; k += kTurn) {
    __m512 low = _mm512_loadu_ps(from + k), high = _mm512_loadu_ps(from + k + 16);
#pragma GCC unroll 5
    for (int stage = 0; stage < 5; ++stage) {
      const __m512 a = _mm512_permutex2var_ps(low, even, high), b = _mm512_permutex2var_ps(low, odd, high);
      low = _mm512_add_ps(a, b);
      high = _mm512_sub_ps(a, b);
    }
    _mm512_storeu_ps(to + k, low);
    _mm512_storeu_ps(to + k + 16, high);
  }
}

#else

inline void turn_stage(float* to, const float* from) {
#pragma GCC ivdep
  for (size_t i = 0; i < kTurn / 2; ++i) {
    const float a = from[2 * i], b = from[2 * i + 1];
    to[i] = a + b;
    to[i + kTurn / 2] = a - b;
  }
}

/// n: a multiple of 32. to may be from.
ZC_SHARED inline void turn(float* to, const float* from, size_t n) {
  alignas(64) float a[kTurn], b[kTurn];
  for (size_t k = 0; k < n; k += kTurn) {
    turn_stage(a, from + k);
    turn_stage(b, a);
    turn_stage(a, b);
    turn_stage(b, a);
    turn_stage(a, b);
    memcpy(to + k, a, sizeof(a));
  }
}

#endif

ZC_INLINE size_t whole_turns(size_t n) { return (n + kTurn - 1) / kTurn * kTurn; }

/// Decoded values that are turned back are also divided by 32: their scale is, which is exact.
ZC_INLINE float decoding_scale(u16 scale, const Codec& codec) {
  return codec.rotate == 0 ? from_bf16(scale) : from_bf16(scale) * 0x1p-5f;
}

}  // namespace
}  // namespace zcomm::device::ZC_ISA
