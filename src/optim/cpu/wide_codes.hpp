// Codes of 8-bit state (optim/arithmetic/state_codes.hpp), 64 at a time in AVX-512: included by adam_coded.hpp.
//
// Two bytes of a float hold all bits of a code's value, so codes are looked up, 64 at once; they are rounded in 16
// bits, 32 at once.
//
// [Note: order of a group] 64 elements are in 4 registers, which the weight's reader has filled (Order): natural
// r * 16 + lane; even-odd: r / 2 * 32 + lane * 2 + r % 2. Codes are permuted on their way from and to memory.
#pragma once

#include "optim/arithmetic/state_codes.hpp"
#include "optim/cpu/adam_wide.hpp"

namespace zcomm::optim::ZC_ISA {
namespace {

using u8 = std::uint8_t;
constexpr size_t kGroup = 64;

#if ZC_ISA_LEVEL >= 3
constexpr Order kCodedSplitOrder = Order::even_odd;  // of a bf16 weight
#else
constexpr Order kCodedSplitOrder = Order::natural;
#endif

constexpr size_t element_at(Order order, size_t r, size_t lane) {
  return order == Order::natural ? r * 16 + lane : r / 2 * 32 + lane * 2 + r % 2;
}

struct Quad {
  __m512 r[4];
};

struct Bytes {
  alignas(64) u8 at[64];
};
ZC_INLINE __m512i load(const void* from) { return _mm512_loadu_si512(from); }

#if ZC_ISA_LEVEL >= 3  // VBMI: bytes are permuted and looked up

/// The high two bytes of each dword of register r: a code's byte among 64 (3), and among 64 others (2).
constexpr Bytes widening(Order order, size_t r) {
  Bytes p{};
  for (size_t lane = 0; lane < 16; ++lane) {
    p.at[lane * 4 + 3] = static_cast<u8>(element_at(order, r, lane));
    p.at[lane * 4 + 2] = static_cast<u8>(64 + element_at(order, r, lane));
  }
  return p;
}

/// High bytes of words (registers 0 and 1 alternate in the first 64 bytes, 2 and 3 in the others) -> memory order.
constexpr Bytes packing(Order order) {
  Bytes p{};
  for (size_t r = 0; r < 4; ++r)
    for (size_t lane = 0; lane < 16; ++lane)
      p.at[element_at(order, r, lane)] = static_cast<u8>(r / 2 * 64 + lane * 4 + r % 2 * 2 + 1);
  return p;
}

/// Chances as they are drawn -> where register r's lie in an order: see code_chances.
constexpr Bytes chances_in(Order order) {
  Bytes p{};
  for (size_t r = 0; r < 4; ++r)
    for (size_t lane = 0; lane < 16; ++lane) {
      const size_t k = element_at(order, r, lane);
      p.at[lane * 4 + chance_byte(r)] = static_cast<u8>(k % 16 * 4 + chance_byte(k / 16));
    }
  return p;
}

/// Bits 31-24 and 23-16 of a code's value relative to its scale; the others are zero.
struct CodeTables {
  alignas(64) u8 first_high[128], first_low[128], second_high[256], second_low[256];
};

constexpr CodeTables code_tables() {
  CodeTables t{};
  for (u32 code = 1; code < 256; ++code) {
    const u32 bits = __builtin_bit_cast(u32, static_cast<float>(code));
    const u32 first = (bits << kFirstShift) + kFirstFrom, second = (bits << kSecondShift) + kSecondFrom;
    t.second_high[code] = static_cast<u8>(second >> 24);
    t.second_low[code] = static_cast<u8>(second >> 16);
    if (code > 127) continue;
    t.first_high[code] = static_cast<u8>(first >> 24);
    t.first_low[code] = static_cast<u8>(first >> 16);
  }
  return t;
}

constexpr CodeTables kTables = code_tables();
template <Order order, size_t r>
constexpr Bytes kWidening = widening(order, r);
template <Order order>
constexpr Bytes kPacking = packing(order);
template <Order order>
constexpr Bytes kChancesIn = chances_in(order);

ZC_INLINE __m512i permuted(__m512i bytes, const Bytes& p) {
  return _mm512_maskz_permutexvar_epi8(~__mmask64{0}, load(p.at), bytes);
}
ZC_INLINE __m512i looked_up(const u8* table, __m512i low_bits) {  // of 128 bytes
  return _mm512_permutex2var_epi8(load(table), low_bits, load(table + 64));
}
ZC_INLINE __m512i looked_up_in_256(const u8* table, __m512i codes) {
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), looked_up(table, codes), looked_up(table + 128, codes));
}

template <Order order, size_t r>
ZC_INLINE __m512 widened(__m512i high, __m512i low) {
  constexpr __mmask64 high_two = 0xccccccccccccccccu;
  return as_float(_mm512_maskz_permutex2var_epi8(high_two, high, load(kWidening<order, r>.at), low));
}

/// From the two high bytes of values, in the order of memory.
template <Order order>
ZC_INLINE Quad all_widened(__m512i high, __m512i low) {
  return {widened<order, 0>(high, low), widened<order, 1>(high, low), widened<order, 2>(high, low),
          widened<order, 3>(high, low)};
}

template <Order order>
ZC_INLINE Quad first_values(const u8* codes) {  // first_of
  const __m512i c = load(codes), sign = all(0x80808080u);
  const __m512i high = _mm512_ternarylogic_epi32(looked_up(kTables.first_high, c), c, sign, 0xf8);  // a | b & c
  return all_widened<order>(high, looked_up(kTables.first_low, c));
}

template <Order order>
ZC_INLINE Quad second_values(const u8* codes) {  // second_of
  const __m512i c = load(codes);
  const __m512i high = looked_up_in_256(kTables.second_high, c), low = looked_up_in_256(kTables.second_low, c);
  return all_widened<order>(high, low);
}

template <Order order>
ZC_INLINE __m512i chances_of(__m512i drawn) {
  return order == Order::natural ? drawn : permuted(drawn, kChancesIn<order>);
}

/// Codes in the high bytes of words -> memory order.
template <Order order>
ZC_INLINE __m512i packed(__m512i words_01, __m512i words_23) {
  return _mm512_permutex2var_epi8(words_01, load(kPacking<order>.at), words_23);
}

#else  // in natural order: codes are widened one register at a time

ZC_INLINE __m512i wide_u8(const void* from) {
  return _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(static_cast<const __m128i*>(from)));
}

template <Order order>
ZC_INLINE Quad first_values(const u8* codes) {  // first_of
  static_assert(order == Order::natural);
  Quad result;
#pragma GCC unroll 4
  for (size_t r = 0; r < 4; ++r) {
    const __m512i code = wide_u8(codes + r * kLanes), magnitude = _mm512_and_si512(code, all(127));
    const __m512i y = as_bits(_mm512_maskz_cvtepi32_ps(0xffff, magnitude));
    const __m512i bits = _mm512_maskz_add_epi32(_mm512_test_epi32_mask(magnitude, magnitude),
                                                shift_left(y, kFirstShift), all(kFirstFrom));
    const __m512i sign = _mm512_and_si512(shift_left(code, 24), all(0x80000000u));
    result.r[r] = as_float(_mm512_or_si512(bits, sign));
  }
  return result;
}

template <Order order>
ZC_INLINE Quad second_values(const u8* codes) {  // second_of
  static_assert(order == Order::natural);
  Quad result;
#pragma GCC unroll 4
  for (size_t r = 0; r < 4; ++r) {
    const __m512i code = wide_u8(codes + r * kLanes);
    const __m512i y = as_bits(_mm512_maskz_cvtepi32_ps(0xffff, code));
    const __m512i bits =
        _mm512_maskz_add_epi32(_mm512_test_epi32_mask(code, code), shift_left(y, kSecondShift), all(kSecondFrom));
    result.r[r] = as_float(bits);
  }
  return result;
}

template <Order order>
ZC_INLINE __m512i chances_of(__m512i drawn) {
  return drawn;
}

template <Order order>
ZC_INLINE __m512i packed(__m512i words_01, __m512i words_23) {
  const __m512i low = _mm512_maskz_srli_epi16(~__mmask32{0}, words_01, 8);
  const __m512i bytes = _mm512_ternarylogic_epi32(all(0x00ff00ffu), low, words_23, 0xca);  // r: 0, 2, 1, 3 in a lane
  const __m512i by_register =
      _mm512_maskz_broadcast_i32x4(0xffff, _mm_set_epi8(15, 11, 7, 3, 13, 9, 5, 1, 14, 10, 6, 2, 12, 8, 4, 0));
  const __m512i quarters = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const __m512i sorted = _mm512_maskz_shuffle_epi8(~__mmask64{0}, bytes, by_register);
  return _mm512_maskz_permutexvar_epi32(0xffff, quarters, sorted);
}

#endif

// -- Encoding

struct Positions {
  alignas(64) u32 at[kCodeBlock / 4];
};
constexpr Positions positions() {
  Positions p{};
  for (u32 k = 0; k < kCodeBlock / 4; ++k) p.at[k] = k * kGolden;
  return p;
}
constexpr Positions kPositions = positions();

/// Words of two registers, by turns: the low or the high ones of their dwords.
constexpr Words words_from(u16 first) {
  Words w{};
  for (u16 k = 0; k < 32; ++k) w.at[k] = static_cast<u16>(first + k / 2 * 2 + k % 2 * 32);
  return w;
}
constexpr Words kLowWords = words_from(0), kHighWords = words_from(1);
ZC_INLINE __m512i words(__m512i a, const Words& which, __m512i b) {
  return _mm512_permutex2var_epi16(a, load(which.at), b);
}

/// encode_block for a full, finite block.
struct Encoding {
  CodedBlock block;
  Scales scales;
  CodeKey key;

  /// Chances of 64 elements, for registers 0 and 1, and for 2 and 3.
  struct Chances {
    __m512i r01, r23;
  };
  template <Order order>
  ZC_INLINE Chances chances(size_t i) const {  // code_random
    __m512i x = _mm512_xor_si512(load(kPositions.at + i / 4), all(key.bits));
    x = _mm512_mullo_epi32(x, all(kChanceFactor));
    const __m512i drawn = chances_of<order>(_mm512_xor_si512(x, shift_right(x, 16)));
    return {_mm512_and_si512(drawn, all(0x00ff00ffu)), _mm512_maskz_srli_epi16(~__mmask32{0}, drawn, 8)};
  }
  /// Codes of two registers, in the high bytes of words.
  ZC_INLINE __m512i first_codes(__m512 a, __m512 b, __m512i chance) const {
    const __m512i sum = _mm512_maskz_add_epi16(~__mmask32{0}, words(first_fixed(a), kLowWords, first_fixed(b)), chance);
    const __m512i signs = words(as_bits(a), kHighWords, as_bits(b));
    return _mm512_ternarylogic_epi32(sum, signs, all(0x80008000u), 0xf8);  // a | b & c
  }
  ZC_INLINE __m512i first_fixed(__m512 x) const {
    const __m512 magnitude = as_float(_mm512_and_si512(as_bits(x), all(0x7fffffffu)));
    const __m512i bits = as_bits(_mm512_mul_ps(magnitude, _mm512_set1_ps(scales.first_inverse)));
    return fixed(bits, kFirstShift, kFirstUp);
  }
  /// code_of_second; without its minimum, which changes only codes that would otherwise be 0.
  template <bool least>
  ZC_INLINE __m512i second_codes(__m512 a, __m512 b, __m512i chance) const {
    const __m512i fixed = words(second_fixed<least>(a), kLowWords, second_fixed<least>(b));
    return _mm512_maskz_add_epi16(~__mmask32{0}, fixed, chance);
  }
  template <bool least>
  ZC_INLINE __m512i second_fixed(__m512 x) const {
    const __m512i bits = as_bits(_mm512_mul_ps(x, _mm512_set1_ps(scales.second_inverse)));
    const __m512i y = fixed(bits, kSecondShift, kSecondUp);
    if constexpr (!least) return y;
    return _mm512_maskz_max_epu32(_mm512_test_epi32_mask(bits, bits), y, as_bits(_mm512_set1_ps(kFixed + 1.0f)));
  }
  /// The product is exact, so a fused multiply-add rounds once, like a separate product and sum.
  static ZC_INLINE __m512i fixed(__m512i bits, u32 shift, float up) {
    return as_bits(_mm512_fmadd_ps(as_float(shift_right(bits, shift)), _mm512_set1_ps(up), _mm512_set1_ps(kFixed)));
  }
};

}  // namespace
}  // namespace zcomm::optim::ZC_ISA
