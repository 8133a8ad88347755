// Adam's step on 8-bit state in AVX-512: included by optim_body.hpp if ZC_ISA_LEVEL >= 2.
//
// The arithmetic is that of optim/arithmetic/state_codes.hpp and of SmallAdam::update, operation by operation. The step
// of a block has two halves, because its scales follow from all of its elements: averages, which pass through memory in
// L1, then weights and codes. The second half of a block is interleaved with the first of the next, so that the
// divider, the shuffles and the memory are busy at once and chains of dependent instructions are short: the processor
// looks ahead less than 64 elements. For the same reason the next block is prefetched; loops with less arithmetic gain
// nothing by that, because they wait for memory anyway.
#pragma once

#include "optim/cpu/wide_codes.hpp"

namespace zcomm::optim::ZC_ISA {
namespace {

/// Magnitudes so far, as bits.
struct WideRange {
  __m512i first = _mm512_setzero_si512(), second = _mm512_setzero_si512();

  ZC_INLINE void add(__m512 m, __m512 v) {
    first = _mm512_maskz_max_epu32(0xffff, first, _mm512_and_si512(as_bits(m), all(0x7fffffffu)));
    second = _mm512_maskz_max_epu32(0xffff, second, as_bits(v));  // its sign is set only for NaN
  }
  static ZC_INLINE __m128i folded(__m512i x) {
    const __m256i half =
        _mm256_max_epu32(_mm512_maskz_extracti32x8_epi32(0xff, x, 0), _mm512_maskz_extracti32x8_epi32(0xff, x, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }
  ZC_INLINE Largest whole() const {
    const __m128i a = folded(first), b = folded(second);
    const __m128i pairs = _mm_max_epu32(_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
    const auto bits = static_cast<u64>(_mm_cvtsi128_si64(_mm_max_epu32(pairs, _mm_srli_si128(pairs, 8))));
    return {static_cast<u32>(bits), static_cast<u32>(bits >> 32)};
  }
};

/// A block between the two halves of its step: m and v after the first half, register by register.
struct HalfStepped {
  size_t begin;  ///< in the piece
  const float *m, *v;
  Encoding encoding;

  /// Weights and codes of 64 elements.
  template <Order order, class Weight, class Adam>
  ZC_INLINE void finish(const Weight& weight, const Adam& adam, size_t i) const {
    const auto chances = encoding.chances<order>(i);
    __m512i first[2], second[2];
#pragma GCC unroll 2
    for (size_t k = 0; k < 2; ++k) {
      const size_t at = i + k * kPair;
      const __m512i chance = k == 0 ? chances.r01 : chances.r23;
      const __m512 ma = _mm512_load_ps(m + at), mb = _mm512_load_ps(m + at + kLanes);
      const __m512 va = _mm512_load_ps(v + at), vb = _mm512_load_ps(v + at + kLanes);
      const Pair w = weight.template get<order>(begin + at);
      weight.template put<order>(begin + at, {adam.stepped(w.a, ma, va), adam.stepped(w.b, mb, vb)});
      first[k] = encoding.first_codes(ma, mb, chance);
      second[k] = encoding.second_codes<false>(va, vb, chance);
    }
    const __m512i codes = packed<order>(second[0], second[1]);
    _mm512_storeu_si512(encoding.block.first + i, packed<order>(first[0], first[1]));
    _mm512_storeu_si512(encoding.block.second + i, codes);
    if (__builtin_expect(_mm512_testn_epi8_mask(codes, codes) != 0, 0)) finish_zeros<order>(chances, i);
  }
  /// Codes of v if some of them would be 0.
  template <Order order>
  __attribute__((noinline)) void finish_zeros(const Encoding::Chances& chances, size_t i) const {
    __m512i second[2];
    for (size_t k = 0; k < 2; ++k) {
      const float* from = v + i + k * kPair;
      second[k] = encoding.second_codes<true>(_mm512_load_ps(from), _mm512_load_ps(from + kLanes),
                                              k == 0 ? chances.r01 : chances.r23);
    }
    _mm512_storeu_si512(encoding.block.second + i, packed<order>(second[0], second[1]));
  }
};

/// The first half of a full block's step: its new averages go to m and v, in the order's registers. before: another
/// block that is finished in the same loop, if not null.
template <Order order, class Weight, class Grad, class Adam>
ZC_INLINE Largest start_block(const Weight& weight, const Grad& grad, const CodedBlock& block, size_t begin, float* m,
                              float* v, const HalfStepped* before, const Adam& adam) {
  const __m512 first_keep = _mm512_mul_ps(_mm512_set1_ps(block.scales[0]), adam.first_keep);
  const __m512 second_keep = _mm512_mul_ps(_mm512_set1_ps(block.scales[1]), adam.second_keep);
  WideRange range;
  for (size_t i = 0; i < kCodeBlock; i += kGroup) {
    prefetch<kGroup>(block.first + i + kCodeBlock);
    prefetch<kGroup>(block.second + i + kCodeBlock);
    Quad first = first_values<order>(block.first + i), second = second_values<order>(block.second + i);
#pragma GCC unroll 2
    for (size_t r = 0; r < 4; r += 2) {
      const size_t at = i + r * kLanes;
      const Pair w = adam.needs_weight ? weight.template get<order>(begin + at) : Pair{};
      const Pair g = grad.template get<order>(at);
      weight.fetch(begin + at + kCodeBlock);
      grad.fetch(at + kCodeBlock);
      adam.averages(w.a, g.a, first.r[r], second.r[r], first_keep, second_keep);
      adam.averages(w.b, g.b, first.r[r + 1], second.r[r + 1], first_keep, second_keep);
#pragma GCC unroll 2
      for (size_t k = r; k < r + 2; ++k) {
        _mm512_store_ps(m + i + k * kLanes, first.r[k]);
        _mm512_store_ps(v + i + k * kLanes, second.r[k]);
        range.add(first.r[k], second.r[k]);
      }
    }
    if (before != nullptr) before->finish<order>(weight, adam, i);
  }
  return range.whole();
}

/// The output of start_block -> natural order.
template <Order order>
void sort_block(float* x) {
  if (order == Order::natural) return;
  for (size_t i = 0; i < kCodeBlock; i += kPair)
    WideF32{x}.put<order>(i, {_mm512_load_ps(x + i), _mm512_load_ps(x + i + kLanes)});
}

/// The second half if an element is nonfinite.
template <Order order, class Weight, class Adam>
void finish_lost_block(const Weight& weight, const CodedBlock& block, size_t begin, float* m, float* v,
                       const Adam& adam, CodeKey key) {
  for (size_t i = 0; i < kCodeBlock; i += kPair) {
    const Pair w = weight.template get<order>(begin + i);
    const __m512 a = adam.stepped(w.a, _mm512_load_ps(m + i), _mm512_load_ps(v + i));
    const __m512 b = adam.stepped(w.b, _mm512_load_ps(m + i + kLanes), _mm512_load_ps(v + i + kLanes));
    weight.template put<order>(begin + i, {a, b});
  }
  sort_block<order>(m);
  sort_block<order>(v);
  encode_lost_block(block, m, v, key);
}

/// The first `end` elements of a piece: full blocks. plain: steps a block with codes that may be kLost.
template <bool adamw, Order order, class Weight, class Plain>
void step_coded_blocks(const OptimPiece& p, const Weight& weight, size_t end, const AdamFactors& f,
                       const Plain& plain) {
  alignas(64) float m[2][kCodeBlock], v[2][kCodeBlock];
  const WideSmallAdam<adamw> adam(f);
  HalfStepped before;
  bool pending = false;
  int turn = 0;
  for (size_t i = 0; i < end; i += kCodeBlock) {
    const CodedBlock block = block_at(p, i);
    if (__builtin_signbit(block.scales[0])) {
      plain(i);
      continue;
    }
    turn ^= 1;
    Largest largest;
    with_grad(p, i, [&](const auto& grad) {
      largest = start_block<order>(weight, grad, block, i, m[turn], v[turn], pending ? &before : nullptr, adam);
    });
    const CodeKey key = code_key(f.step, p.index + i);
    pending = finite(largest);
    if (!pending) {
      finish_lost_block<order>(weight, block, i, m[turn], v[turn], adam, key);
      continue;
    }
    const Scales scales = scales_of(largest);
    before = {i, m[turn], v[turn], {block, scales, key}};
    block.scales[0] = scales.first;
    block.scales[1] = scales.second;
  }
  for (size_t i = 0; pending && i < kCodeBlock; i += kGroup) before.finish<order>(weight, adam, i);
}

template <bool adamw, class Plain>
void step_coded_blocks(const OptimPiece& p, size_t end, const AdamFactors& f, const Plain& plain) {
  if (p.lo == nullptr) {
    const WideF32 weight{static_cast<float*>(p.weight)};
    step_coded_blocks<adamw, Order::natural>(p, weight, end, f, plain);
  } else {
    const WideSplit weight{static_cast<u16*>(p.weight), p.lo};
    step_coded_blocks<adamw, kCodedSplitOrder>(p, weight, end, f, plain);
  }
}

}  // namespace
}  // namespace zcomm::optim::ZC_ISA
