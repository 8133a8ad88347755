// Adam's step, 16 elements at a time in AVX-512: included by optim_body.hpp if ZC_ISA_LEVEL >= 2.
//
// The arithmetic is Adam::update and SmallAdam::update of optim/arithmetic/update_rules.hpp, operation by operation. It
// is written out because compilers shuffle whole registers to widen and narrow 8- and 16-bit arrays: a bf16 weight with
// bf16 state took 50 cycles per 16 elements that way, against 17 of the divider, which limits any Adam. Rare elements
// (NaN, infinity) use the plain code.
#pragma once

#include "optim/arithmetic/rounding_body.hpp"
#include "optim/arithmetic/split_body.hpp"
#include "optim/arithmetic/update_rules.hpp"

namespace zcomm::optim::ZC_ISA {
namespace {

constexpr size_t kLanes = 16, kPair = 32;

/// 32 elements. Natural: the first 16 and the others. Even-odd: the elements at even and at odd indices, into which a
/// shift and a mask split a register of 16-bit numbers: the cost is in the shuffles, because only they run concurrently
/// with the divider.
enum class Order { natural, even_odd };
struct Pair {
  __m512 a, b;
};

// The maskz forms avoid a false warning of GCC 12 (see device/convert_body.hpp).
ZC_INLINE void store_u16(void* to, __m512i x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, x));
}
ZC_INLINE __m512i shift_left(__m512i x, unsigned by) { return _mm512_maskz_slli_epi32(0xffff, x, by); }
ZC_INLINE __m512i shift_right(__m512i x, unsigned by) { return _mm512_maskz_srli_epi32(0xffff, x, by); }
ZC_INLINE __m512i all(u32 x) { return _mm512_set1_epi32(static_cast<int>(x)); }
ZC_INLINE __m512 as_float(__m512i x) { return _mm512_castsi512_ps(x); }
ZC_INLINE __m512i as_bits(__m512 x) { return _mm512_castps_si512(x); }
ZC_INLINE __m512i iota() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

/// Indices of the lanes of a (b: one more in even-odd, 16 more in natural order).
template <Order order>
ZC_INLINE __m512i places() {
  return order == Order::natural ? iota() : _mm512_add_epi32(iota(), iota());
}

ZC_INLINE __m512i wide_random_bits(__m512i index, RoundingKey key) {  // random_bits
  __m512i x = _mm512_xor_si512(index, all(key.first));
  x = _mm512_mullo_epi32(_mm512_xor_si512(x, shift_right(x, 16)), all(0x7feb352du));
  x = _mm512_add_epi32(_mm512_xor_si512(x, shift_right(x, 15)), all(key.second));
  x = _mm512_mullo_epi32(x, all(0x846ca68bu));
  return _mm512_xor_si512(x, shift_right(x, 16));
}

/// Prefetches `count` elements into the nearest cache; has no effect beyond an array's end.
template <size_t count, class T>
ZC_INLINE void prefetch(const T* from) {
  for (size_t nbytes = 0; nbytes < count * sizeof(T); nbytes += 64)
    _mm_prefetch(reinterpret_cast<const char*>(from) + nbytes, _MM_HINT_T0);
}

// -- Arrays of a type: fetch, get and put 32 elements

struct WideF32 {
  float* at;

  ZC_INLINE void fetch(size_t i) const { prefetch<kPair>(at + i); }
  template <Order order>
  ZC_INLINE Pair get(size_t i) const {
    const __m512 low = _mm512_loadu_ps(at + i), high = _mm512_loadu_ps(at + i + kLanes);
    if constexpr (order == Order::natural) return {low, high};
    const __m512i even = _mm512_add_epi32(iota(), iota()), odd = _mm512_add_epi32(even, all(1));
    return {_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)};
  }
  template <Order order>
  ZC_INLINE void put(size_t i, Pair x) const {
    if constexpr (order == Order::even_odd) {
      const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
      const __m512 a = _mm512_permutex2var_ps(x.a, low, x.b);
      x.b = _mm512_permutex2var_ps(x.a, _mm512_add_epi32(low, all(8)), x.b);
      x.a = a;
    }
    _mm512_storeu_ps(at + i, x.a);
    _mm512_storeu_ps(at + i + kLanes, x.b);
  }
};

/// a -> the low, b -> the high halves of 32 bits: elements in even-odd order.
ZC_INLINE __m512i merged(__m512i a_in_low, __m512i b_in_high) {
  return _mm512_ternarylogic_epi32(all(0xffffu), a_in_low, b_in_high, 0xca);  // mask ? a : b
}

/// Indices of words, for a permutation.
struct Words {
  alignas(64) u16 at[32];
};
/// Word k of 16 -> the high word of dword k: of the first 16 words, or of the others.
constexpr Words words_to_high(u16 first) {
  Words w{};
  for (u16 k = 0; k < 32; ++k) w.at[k] = static_cast<u16>(first + k / 2);
  return w;
}
/// High words of two registers' dwords, one register after the other.
constexpr Words high_words() {
  Words w{};
  for (u16 k = 0; k < 32; ++k) w.at[k] = static_cast<u16>(k * 2 + 1);
  return w;
}
constexpr Words kFirstToHigh = words_to_high(0), kOthersToHigh = words_to_high(16), kHighWordsInOrder = high_words();

struct WideBf16 {
  u16* at;

  ZC_INLINE void fetch(size_t i) const { prefetch<kPair>(at + i); }
  template <Order order>
  ZC_INLINE Pair get(size_t i) const {
    const __m512i x = _mm512_loadu_si512(at + i);
    if constexpr (order == Order::natural) {
      constexpr __mmask32 high = 0xaaaaaaaau;
      return {as_float(_mm512_maskz_permutexvar_epi16(high, _mm512_load_si512(kFirstToHigh.at), x)),
              as_float(_mm512_maskz_permutexvar_epi16(high, _mm512_load_si512(kOthersToHigh.at), x))};
    }
    return {as_float(shift_left(x, 16)), as_float(_mm512_and_si512(x, all(0xffff0000u)))};
  }
  /// The high halves.
  template <Order order>
  ZC_INLINE void put_high(size_t i, __m512i a, __m512i b) const {
    if constexpr (order == Order::natural) {
      _mm512_storeu_si512(at + i, _mm512_permutex2var_epi16(a, _mm512_load_si512(kHighWordsInOrder.at), b));
    } else {
      _mm512_storeu_si512(at + i, merged(shift_right(a, 16), b));
    }
  }
};

struct WideF16 {
  const u16* at;

  ZC_INLINE void fetch(size_t i) const { prefetch<kPair>(at + i); }
  template <Order order>
  ZC_INLINE Pair get(size_t i) const {
    const auto* from = reinterpret_cast<const __m256i*>(at + i);
    const __m512 low = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(from));
    const __m512 high = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(from + 1));
    if constexpr (order == Order::natural) return {low, high};
    const __m512i even = _mm512_add_epi32(iota(), iota()), odd = _mm512_add_epi32(even, all(1));
    return {_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)};
  }
};

/// A bf16 weight and its remainder.
struct WideSplit {
  u16* w;
  int16_t* lo;

  ZC_INLINE void fetch(size_t i) const {
    prefetch<kPair>(w + i);
    prefetch<kPair>(lo + i);
  }
  template <Order order>
  ZC_INLINE Pair get(size_t i) const {
    const Pair high = WideBf16{w}.get<order>(i);
    if constexpr (order == Order::natural) {
      const auto* from = reinterpret_cast<const __m256i*>(lo + i);
      return {plus(high.a, _mm512_maskz_cvtepi16_epi32(0xffff, _mm256_loadu_si256(from))),
              plus(high.b, _mm512_maskz_cvtepi16_epi32(0xffff, _mm256_loadu_si256(from + 1)))};
    } else {  // the multiplier adds adjacent elements: 1 * even + 0 * odd, signed
      const __m512i low = _mm512_loadu_si512(lo + i);
      return {plus(high.a, _mm512_madd_epi16(low, all(1u))), plus(high.b, _mm512_madd_epi16(low, all(0x10000u)))};
    }
  }
  /// As join_one().
  static ZC_INLINE __m512 plus(__m512 high, __m512i low) {
    const __m512 sum = as_float(_mm512_add_epi32(as_bits(high), low));
    return _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), high);
  }

  template <Order order>
  ZC_INLINE void put(size_t i, Pair x) const {
    const __m512i a = as_bits(x.a), b = as_bits(x.b), half = all(0x8000u);
    WideBf16{w}.put_high<order>(i, _mm512_add_epi32(a, half), _mm512_add_epi32(b, half));
    if constexpr (order == Order::natural) {
      store_u16(lo + i, a);
      store_u16(lo + i + kLanes, b);
    } else {
      _mm512_storeu_si512(lo + i, merged(a, shift_left(b, 16)));
    }
    if (__builtin_expect(_mm512_cmp_ps_mask(x.a, x.a, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(x.b, x.b, _CMP_UNORD_Q), 0))
      put_plain<order>(i, x);
  }
  template <Order order>
  void put_plain(size_t i, Pair x) const {
    float plain[kPair];
    WideF32{plain}.put<order>(0, x);
    for (size_t k = 0; k < kPair; ++k) {
      w[i + k] = high_half(bits_of(plain[k]));
      lo[i + k] = low_half(bits_of(plain[k]));
    }
  }
};

// -- State

struct WideExact {
  WideF32 m, v;

  template <Order order>
  ZC_INLINE Pair first(size_t i) const {
    return m.get<order>(i);
  }
  template <Order order>
  ZC_INLINE Pair second(size_t i) const {
    return v.get<order>(i);
  }
  template <Order order>
  ZC_INLINE void put(size_t i, Pair a, Pair b) {
    m.put<order>(i, a);
    v.put<order>(i, b);
  }
};

struct WideRounded {
  WideBf16 m, v;
  u32 index;
  RoundingKey key;

  template <Order order>
  ZC_INLINE Pair first(size_t i) const {
    return m.get<order>(i);
  }
  template <Order order>
  ZC_INLINE Pair second(size_t i) const {
    return v.get<order>(i);
  }
  template <Order order>
  ZC_INLINE void put(size_t i, Pair a, Pair b) {
    const __m512i at = _mm512_add_epi32(all(index + static_cast<u32>(i)), places<order>());
    const __m512i first = wide_random_bits(at, key);
    const __m512i second = wide_random_bits(_mm512_add_epi32(at, all(order == Order::natural ? kLanes : 1)), key);
    const __m512i low = all(0xffffu);
    m.put_high<order>(i, _mm512_add_epi32(as_bits(a.a), _mm512_and_si512(first, low)),
                      _mm512_add_epi32(as_bits(a.b), _mm512_and_si512(second, low)));
    v.put_high<order>(i, _mm512_add_epi32(as_bits(b.a), shift_right(first, 16)),
                      _mm512_add_epi32(as_bits(b.b), shift_right(second, 16)));
    if (__builtin_expect(maybe_special(a.a, b.a) | maybe_special(a.b, b.b), 0)) put_plain<order>(i, a, b);
  }
  /// Whether one of them may be infinite or NaN: the exponents' bits together are all ones.
  static ZC_INLINE __mmask16 maybe_special(__m512 x, __m512 y) {
    const __m512i exponent = all(0x7f800000u);
    const __m512i both = _mm512_and_si512(_mm512_or_si512(as_bits(x), as_bits(y)), exponent);
    return _mm512_cmpeq_epi32_mask(both, exponent);
  }
  template <Order order>
  void put_plain(size_t i, Pair a, Pair b) const {
    float first[kPair], second[kPair];
    WideF32{first}.put<order>(0, a);
    WideF32{second}.put<order>(0, b);
    for (size_t k = 0; k < kPair; ++k) {
      const u32 random = random_bits(index + static_cast<u32>(i + k), key);
      m.at[i + k] = stochastic_bf16(first[k], random & 0xffffu);
      v.at[i + k] = stochastic_bf16(second[k], random >> 16);
    }
  }
};

// -- The step

/// with_decay() of 16 elements.
struct WideDecay {
  __m512 l2;
  __mmask16 is_any;

  ZC_INLINE explicit WideDecay(float decay)
      : l2(_mm512_set1_ps(decay)), is_any(static_cast<__mmask16>(decay != 0.0f ? 0xffff : 0)) {}
  ZC_INLINE __m512 added(__m512 g, __m512 w) const { return _mm512_mask_add_ps(g, is_any, g, _mm512_mul_ps(l2, w)); }
};

/// Adam::update of 16 elements.
template <bool adamw>
struct WideAdam {
  static constexpr bool needs_weight = !adamw;  // for the averages
  __m512 scale, decay, one_minus_beta1, beta2, one_minus_beta2, eps, inverse_root, step_size;
  WideDecay l2;

  ZC_INLINE explicit WideAdam(const AdamFactors& f)
      : scale(_mm512_set1_ps(f.grad_scale)),
        decay(_mm512_set1_ps(f.decay)),
        one_minus_beta1(_mm512_set1_ps(f.one_minus_beta1)),
        beta2(_mm512_set1_ps(f.beta2)),
        one_minus_beta2(_mm512_set1_ps(f.one_minus_beta2)),
        eps(_mm512_set1_ps(f.eps)),
        inverse_root(_mm512_set1_ps(f.inverse_root_bias2)),
        step_size(_mm512_set1_ps(f.step_size)),
        l2(f.l2) {}

  ZC_INLINE void update(__m512& w, __m512 g, __m512& m, __m512& v) const {
    averages(w, g, m, v);
    w = stepped(w, m, v);
  }
  ZC_INLINE void averages(__m512 w, __m512 g, __m512& m, __m512& v) const {
    g = _mm512_mul_ps(g, scale);
    if constexpr (!adamw) g = l2.added(g, w);
    m = _mm512_add_ps(m, _mm512_mul_ps(one_minus_beta1, _mm512_sub_ps(g, m)));
    v = _mm512_add_ps(_mm512_mul_ps(v, beta2), _mm512_mul_ps(_mm512_mul_ps(one_minus_beta2, g), g));
  }
  ZC_INLINE __m512 stepped(__m512 w, __m512 m, __m512 v) const {
    if constexpr (adamw) w = _mm512_mul_ps(w, decay);
    const __m512 root = _mm512_maskz_sqrt_ps(0xffff, v);
    const __m512 denominator = _mm512_add_ps(_mm512_mul_ps(root, inverse_root), eps);
    return _mm512_sub_ps(w, _mm512_div_ps(_mm512_mul_ps(step_size, m), denominator));
  }
};

/// SmallAdam::update of 16 elements.
template <bool adamw>
struct WideSmallAdam {
  static constexpr bool needs_weight = !adamw;  // for the averages
  __m512 scale, decay, first_keep, first_gain, second_keep, second_gain, slope, eps;
  WideDecay l2;

  ZC_INLINE explicit WideSmallAdam(const AdamFactors& factors) : l2(factors.small.l2) {
    const SmallAdamFactors& f = factors.small;
    scale = _mm512_set1_ps(f.grad_scale);
    decay = _mm512_set1_ps(f.decay);
    first_keep = _mm512_set1_ps(f.first_keep);
    first_gain = _mm512_set1_ps(f.first_gain);
    second_keep = _mm512_set1_ps(f.second_keep);
    second_gain = _mm512_set1_ps(f.second_gain);
    slope = _mm512_set1_ps(f.slope);
    eps = _mm512_set1_ps(f.eps);
  }
  ZC_INLINE void update(__m512& w, __m512 g, __m512& m, __m512& v) const {
    averages(w, g, m, v, first_keep, second_keep);
    w = stepped(w, m, v);
  }
  ZC_INLINE void averages(__m512 w, __m512 g, __m512& m, __m512& v, __m512 keep, __m512 second) const {
    if constexpr (!adamw) g = l2.added(_mm512_mul_ps(g, scale), w);
    const __m512 root = _mm512_mul_ps(g, second_gain);
    m = _mm512_add_ps(_mm512_mul_ps(m, keep), _mm512_mul_ps(g, first_gain));
    v = _mm512_add_ps(_mm512_mul_ps(v, second), _mm512_mul_ps(root, root));
  }
  ZC_INLINE __m512 stepped(__m512 w, __m512 m, __m512 v) const {
    if constexpr (adamw) w = _mm512_mul_ps(w, decay);
    const __m512 denominator = _mm512_add_ps(_mm512_mul_ps(_mm512_maskz_sqrt_ps(0xffff, v), slope), eps);
    return _mm512_sub_ps(w, _mm512_div_ps(m, denominator));
  }
};

/// Elements [0, n), n a multiple of kPair.
template <Order order, class Weight, class State, class Grad, class Adam>
ZC_INLINE void adam_wide(const Weight& weight, State& state, const Grad& grad, size_t n, const Adam& step) {
  const Adam adam = step;
  for (size_t i = 0; i < n; i += kPair) {
    Pair w = weight.template get<order>(i), m = state.template first<order>(i), v = state.template second<order>(i);
    const Pair g = grad.template get<order>(i);
    adam.update(w.a, g.a, m.a, v.a);
    adam.update(w.b, g.b, m.b, v.b);
    state.template put<order>(i, m, v);
    weight.template put<order>(i, w);
  }
}

/// Calls body(gradient reader) for elements from `begin` on.
template <class Body>
ZC_INLINE void with_grad(const OptimPiece& p, size_t begin, const Body& body) {
  u16* half = static_cast<u16*>(const_cast<void*>(p.grad)) + begin;  // it is only read
  if (p.grad_dtype == DType::float32) return body(WideF32{static_cast<float*>(const_cast<void*>(p.grad)) + begin});
  p.grad_dtype == DType::bfloat16 ? body(WideBf16{half}) : body(WideF16{half});
}

constexpr Order kOrder = Order::natural;  // of an f32 weight
constexpr Order kSplitOrder = Order::even_odd;

/// Elements [begin, begin + n) with `state` (its element 0 is `begin`); n a multiple of kPair.
template <class State, class Adam>
void adam_wide_part(const OptimPiece& p, size_t begin, size_t n, State& state, const Adam& adam) {
  with_grad(p, begin, [&](const auto& grad) {
    if (p.lo == nullptr) {
      adam_wide<kOrder>(WideF32{static_cast<float*>(p.weight) + begin}, state, grad, n, adam);
    } else {
      adam_wide<kSplitOrder>(WideSplit{static_cast<u16*>(p.weight) + begin, p.lo + begin}, state, grad, n, adam);
    }
  });
}

}  // namespace
}  // namespace zcomm::optim::ZC_ISA
