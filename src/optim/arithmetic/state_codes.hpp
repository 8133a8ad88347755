// 8-bit codes of Adam's state: included by optim/cpu/optim_body.hpp once per instruction set.
//
// [Note: 8-bit codes] zcomm/optim_shard.hpp has the arrays ([Note: 8-bit state]). The code book is dynamic-exponent as
// in Dettmers et al. 2110.02861 (precision falls with magnitude, relative to the block's largest), but with powers of
// two, so that it needs no table: code c stands for y = c, and the bits of y as a float, shifted left by s, are (but
// for a constant) the bits of the value. With s = 2 (m, 7 bits and a sign) [1/16, 1) has 16 codes per octave, [1/256,
// 1/16) 8, and so on down to 2^-28; with s = 3 (v, 8 bits) [1/256, 1) has 16 per octave, down to 2^-64: its root has
// the range of m. Within a code's cell the value is linear in y, so stochastic rounding of y is stochastic rounding of
// the value.
#pragma once

#include "optim/arithmetic/rounding_body.hpp"
#include "optim/optim_table.hpp"

namespace zcomm::optim::ZC_ISA {
namespace {

constexpr size_t kCodeBlock = kStateBlock;

// bits(value) = (bits(y) << shift) + kFrom (modulo 2^32). y = 128 (m) or 256 (v) is the value 1, so the highest code
// stands for 31/32; a scale is the block's largest times a little over 32/31. In the other direction, y is twice the
// value with its bits shifted right, times kUp: twice, because the exponent of 2 is a multiple of 2^shift.
constexpr u32 kFirstShift = 2, kFirstFrom = 0x33800000u;
constexpr u32 kSecondShift = 3, kSecondFrom = 0x23800000u;
constexpr float kFirstUp = 0x1p+102f, kSecondUp = 0x1p+119f;
constexpr float kOverTop = 0x1.08422p+0f;  // 32/31, and 2^-20 more: y of the largest must not pass the highest code
constexpr float kLeast = 0x1p-120f;        // a block with a smaller largest is zero: 2 / scale must be finite
constexpr u32 kMost = 0x7f700000u;         // 30/32 of 2^128: larger values have no finite scale and count as nonfinite
constexpr float kFixed = 32768.0f;         // y + 2^15 has y in its low bits, in units of 2^-8, to nearest
constexpr u32 kLost = 0x80u;               // m's code for nonfinite elements; the block's scale of m is then negative

/// Random numbers of a block: 4 chances of 8 bits in each, for elements k, k + 16, k + 32 and k + 48 of 64. m and v of
/// an element share one chance: each has the right mean, and both usually round up together, which keeps their ratio,
/// and so the step, closer.
struct CodeKey {
  u32 bits;
};
constexpr u32 kGolden = 0x9e3779b9u, kChanceFactor = 0x7feb352du;

ZC_INLINE CodeKey code_key(u64 step, u64 index) {
  const RoundingKey key = rounding_key(step, index >> 32);
  return {random_bits(static_cast<u32>(index), key)};
}

ZC_INLINE u32 code_random(u32 position, CodeKey key) {
  u32 x = (position * kGolden) ^ key.bits;
  x *= kChanceFactor;
  return x ^ (x >> 16);
}

/// Byte of a random number that is the chance of the quarter `r` of 64 elements.
ZC_INLINE constexpr u32 chance_byte(u32 r) { return r % 2 * 2 + r / 2; }

/// Chance of element k of a block.
ZC_INLINE u32 code_chance(u32 k, CodeKey key) {
  return code_random((k >> 6 << 4) | (k & 15u), key) >> (8 * chance_byte(k >> 4 & 3u)) & 0xffu;
}

/// Replaces a CodeKey: rounds to nearest.
struct Nearest {};
ZC_INLINE u32 code_chance(u32, Nearest) { return 0x80u; }

/// Relative to its scale.
ZC_INLINE float first_of(u32 code) {
  const u32 magnitude = code & 127u;
  const u32 bits = (bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude))) << kFirstShift) + kFirstFrom;
  return float_of((magnitude == 0 ? 0u : bits) | (code & 128u) << 24);
}

ZC_INLINE float second_of(u32 code) {
  const u32 bits = (bits_of(static_cast<float>(static_cast<std::int32_t>(code))) << kSecondShift) + kSecondFrom;
  return float_of(code == 0 ? 0u : bits);
}

/// y in units of 2^-8. bits: of twice the value.
ZC_INLINE u32 fixed_code(u32 bits, u32 shift, float up) {
  return bits_of(float_of(bits >> shift) * up + kFixed) & 0xffffu;
}

/// inverse: 2 / scale. chance: 8 bits.
ZC_INLINE u32 code_of_first(float m, float inverse, u32 chance) {
  const u32 magnitude = bits_of(float_of(bits_of(m) & 0x7fffffffu) * inverse);
  return (fixed_code(magnitude, kFirstShift, kFirstUp) + chance) >> 8 | (bits_of(m) >> 24 & 128u);
}

/// Never 0 for a nonzero v, because a step divides by its root.
ZC_INLINE u32 code_of_second(float v, float inverse, u32 chance) {
  const u32 bits = bits_of(v * inverse), y = fixed_code(bits, kSecondShift, kSecondUp), least = y < 256u ? 256u : y;
  return bits == 0 ? 0u : (least + chance) >> 8;
}

// -- One block of at most kCodeBlock elements

struct CodedBlock {
  std::uint8_t *first, *second;
  float* scales;  ///< of m and v; m's is negative if a code may be kLost
  size_t count;
};

inline CodedBlock block_at(const OptimPiece& p, size_t i) {
  return {static_cast<std::uint8_t*>(p.state[0]) + i, static_cast<std::uint8_t*>(p.state[1]) + i,
          p.scales + i / kCodeBlock * 2, p.count - i < kCodeBlock ? p.count - i : kCodeBlock};
}

struct Largest {
  u32 first, second;  ///< bits of the largest magnitudes
};

/// Values times factors.
inline void decode_block(float* m, float* v, const CodedBlock& b, float first, float second) {
  const size_t n = b.count;
#pragma GCC ivdep
  for (size_t k = 0; k < n; ++k) m[k] = first_of(b.first[k]) * first;
#pragma GCC ivdep
  for (size_t k = 0; k < n; ++k) v[k] = second_of(b.second[k]) * second;
  if (!__builtin_signbit(b.scales[0])) return;
  for (size_t k = 0; k < n; ++k)
    if (b.first[k] == kLost) m[k] = v[k] = __builtin_nanf("");
}

inline Largest largest_of(const float* m, const float* v, size_t n) {
  Largest largest{0, 0};
  for (size_t k = 0; k < n; ++k) {
    const u32 a = bits_of(m[k]) & 0x7fffffffu, b = bits_of(v[k]) & 0x7fffffffu;
    largest.first = a > largest.first ? a : largest.first;
    largest.second = b > largest.second ? b : largest.second;
  }
  return largest;
}

ZC_INLINE bool finite(float x) { return (bits_of(x) & 0x7fffffffu) < kMost; }
ZC_INLINE bool finite(Largest x) { return x.first < kMost && x.second < kMost; }

/// Scales of a block of finite elements, and 2 / scale, which is 0 if the block is zero.
struct Scales {
  float first, second, first_inverse, second_inverse;
};

ZC_INLINE float scale_of(u32 largest) {
  const float most = float_of(largest), scale = most * kOverTop;
  return most < kLeast ? 0.0f : scale;
}

ZC_INLINE Scales scales_of(Largest largest) {
  const float first = scale_of(largest.first), second = scale_of(largest.second);
  return {first, second, first == 0.0f ? 0.0f : 2.0f / first, second == 0.0f ? 0.0f : 2.0f / second};
}

/// m, v -> codes of a block with nonfinite elements; the finite ones keep their precision.
template <class Key>
void encode_lost_block(const CodedBlock& b, float* m, float* v, Key key) {
  bool lost[kCodeBlock];
  for (size_t k = 0; k < b.count; ++k) {
    lost[k] = !finite(m[k]) || !finite(v[k]);
    if (lost[k]) m[k] = v[k] = 0.0f;
  }
  const Scales s = scales_of(largest_of(m, v, b.count));
  b.scales[0] = -s.first;
  b.scales[1] = s.second;
  for (size_t k = 0; k < b.count; ++k) {
    const u32 chance = code_chance(static_cast<u32>(k), key);
    const u32 first = code_of_first(m[k], s.first_inverse, chance);
    b.first[k] = static_cast<std::uint8_t>(lost[k] ? kLost : (first & 127u) == 0 ? 0u : first);
    b.second[k] = static_cast<std::uint8_t>(code_of_second(v[k], s.second_inverse, chance));
  }
}

/// m, v: nonfinite elements are overwritten.
template <class Key>
void encode_block(const CodedBlock& b, float* m, float* v, Largest largest, Key key) {
  if (!finite(largest)) return encode_lost_block(b, m, v, key);
  const Scales s = scales_of(largest);
  b.scales[0] = s.first;
  b.scales[1] = s.second;
  const size_t n = b.count;
#pragma GCC ivdep
  for (size_t k = 0; k < n; ++k) {
    const u32 chance = code_chance(static_cast<u32>(k), key);
    b.first[k] = static_cast<std::uint8_t>(code_of_first(m[k], s.first_inverse, chance));
    b.second[k] = static_cast<std::uint8_t>(code_of_second(v[k], s.second_inverse, chance));
  }
}

}  // namespace
}  // namespace zcomm::optim::ZC_ISA
