// Optimizer steps, split master and block squares, written once as loops that the compiler vectorises; see
// [Note: one definition].
//
// 16-bit gradients are widened into a block in L1 first, so one loop serves all gradient types. Adam in AVX-512 is
// adam_wide.hpp and adam_coded.hpp, which leave the rest of a block to these loops.
#pragma once

#include "optim/arithmetic/rounding_body.hpp"
#include "optim/arithmetic/split_body.hpp"
#include "optim/arithmetic/state_codes.hpp"
#include "optim/arithmetic/update_rules.hpp"
#include "optim/optim_table.hpp"
#if ZC_ISA_LEVEL >= 2
#include "optim/cpu/adam_coded.hpp"
#include "optim/cpu/adam_wide.hpp"
#endif

namespace zcomm::optim::ZC_ISA {
namespace {

constexpr size_t kBlock = 1024;

// -- Steps

/// Arrays of one block's state, and reading and writing their elements.
struct ExactState {
  float *first, *second;

  ZC_INLINE float get(const float* from, size_t i) const { return from[i]; }
  template <class Rule>
  ZC_INLINE void put(size_t i, float a, float b) const {
    if constexpr (Rule::arrays > 0) first[i] = a;
    if constexpr (Rule::arrays > 1) second[i] = b;
  }
};

struct RoundedState {
  u16 *first, *second;
  u32 index;
  RoundingKey key;

  ZC_INLINE float get(const u16* from, size_t i) const { return from_bf16(from[i]); }
  template <class Rule>
  ZC_INLINE void put(size_t i, float a, float b) const {
    const u32 random = random_bits(index + static_cast<u32>(i), key);
    if constexpr (Rule::arrays > 0) first[i] = stochastic_bf16(a, random & 0xffffu);
    if constexpr (Rule::arrays > 1) second[i] = stochastic_bf16(b, random >> 16);
  }
};

template <class Rule, bool split, class State>
void update_block(void* weight, int16_t* lo, const State& arrays, const float* g, size_t n,
                  const typename Rule::Factors& factors) {
  const typename Rule::Factors f = factors;
  const State state = arrays;
  auto* w32 = static_cast<float*>(weight);
  auto* w16 = static_cast<u16*>(weight);
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    float a = 0.0f, b = 0.0f;
    if constexpr (Rule::arrays > 0) a = state.get(state.first, i);
    if constexpr (Rule::arrays > 1) b = state.get(state.second, i);
    if constexpr (split) {
      const u32 bits = bits_of(Rule::update(join_one(w16[i], lo[i]), g[i], a, b, f));
      w16[i] = high_half(bits);
      lo[i] = low_half(bits);
    } else {
      w32[i] = Rule::update(w32[i], g[i], a, b, f);
    }
    state.template put<Rule>(i, a, b);
  }
}

/// Gradient elements [begin, begin + n) as f32, in `local` if they must be widened.
const float* widened(float* local, const void* grad, DType dtype, size_t begin, size_t n) {
  if (dtype == DType::float32) return static_cast<const float*>(grad) + begin;
  const u16* half = static_cast<const u16*>(grad) + begin;
  dtype == DType::bfloat16 ? widen_bf16(local, half, n) : widen_f16(local, half, n);
  return local;
}

template <class Rule, class State>
void update_split_or_not(const OptimPiece& p, size_t i, size_t n, const State& state, const float* g,
                         const typename Rule::Factors& f) {
  if (p.lo == nullptr) {
    update_block<Rule, false>(static_cast<float*>(p.weight) + i, nullptr, state, g, n, f);
  } else {
    update_block<Rule, true>(static_cast<u16*>(p.weight) + i, p.lo + i, state, g, n, f);
  }
}

template <class T, class Rule>
T* array_at(const OptimPiece& p, int which, size_t i) {
  return which < Rule::arrays ? static_cast<T*>(p.state[which]) + i : nullptr;
}

#if ZC_ISA_LEVEL >= 2
template <class Rule>
constexpr bool kIsAdam = false;
template <bool adamw>
constexpr bool kIsAdam<Adam<adamw>> = true;
#endif

template <class Rule>
void update(const OptimPiece& p, const typename Rule::Factors& f) {
  alignas(64) float local[kBlock];
  size_t i = 0;
#if ZC_ISA_LEVEL >= 2
  if constexpr (kIsAdam<Rule>) {
    WideExact wide{{array_at<float, Rule>(p, 0, 0)}, {array_at<float, Rule>(p, 1, 0)}};
    i = p.count / kPair * kPair;
    adam_wide_part(p, 0, i, wide, WideAdam<Rule::decoupled>(f));
  }
#endif
  for (; i < p.count; i += kBlock) {
    const size_t n = p.count - i < kBlock ? p.count - i : kBlock;
    const ExactState state{array_at<float, Rule>(p, 0, i), array_at<float, Rule>(p, 1, i)};
    update_split_or_not<Rule>(p, i, n, state, widened(local, p.grad, p.grad_dtype, i, n), f);
  }
}

template <class Rule>
void update_rounded(const OptimPiece& p, const AdamFactors& f) {
  alignas(64) float local[kBlock];
  for (size_t i = 0, n = 0; i < p.count; i += n) {
    const u64 index = p.index + i, to_next_key = (u64{1} << 32) - static_cast<u32>(index);
    n = p.count - i;
    if (n > to_next_key) n = to_next_key;
    const RoundingKey key = rounding_key(f.step, index >> 32);
#if ZC_ISA_LEVEL >= 2
    if (n >= kPair) {
      n = n / kPair * kPair;
      WideRounded wide{{array_at<u16, Rule>(p, 0, i)}, {array_at<u16, Rule>(p, 1, i)}, static_cast<u32>(index), key};
      adam_wide_part(p, i, n, wide, WideSmallAdam<Rule::decoupled>(f));
      continue;
    }
#endif
    if (n > kBlock) n = kBlock;
    const RoundedState state{array_at<u16, Rule>(p, 0, i), array_at<u16, Rule>(p, 1, i), static_cast<u32>(index), key};
    update_split_or_not<Rule>(p, i, n, state, widened(local, p.grad, p.grad_dtype, i, n), f.small);
  }
}

/// 8-bit state: the piece begins at a block boundary; see optim/arithmetic/state_codes.hpp.
template <class Rule>
void update_coded(const OptimPiece& p, size_t i, const AdamFactors& f) {
  alignas(64) float m[kCodeBlock], v[kCodeBlock], local[kCodeBlock];
  const CodedBlock block = block_at(p, i);
  decode_block(m, v, block, 1.0f, 1.0f);
  SmallAdamFactors factors = f.small;  // a scale multiplies the kept part
  factors.first_keep *= __builtin_fabsf(block.scales[0]);
  factors.second_keep *= block.scales[1];
  const float* g = widened(local, p.grad, p.grad_dtype, i, block.count);
  update_split_or_not<Rule>(p, i, block.count, ExactState{m, v}, g, factors);
  encode_block(block, m, v, largest_of(m, v, block.count), code_key(f.step, p.index + i));
}

template <class Rule>
void update_coded(const OptimPiece& p, const AdamFactors& f) {
  size_t i = 0;
#if ZC_ISA_LEVEL >= 2
  i = p.count / kCodeBlock * kCodeBlock;
  step_coded_blocks<Rule::decoupled>(p, i, f, [&](size_t begin) { update_coded<Rule>(p, begin, f); });
#endif
  for (; i < p.count; i += kCodeBlock) update_coded<Rule>(p, i, f);
}

void decode_state(float* m, float* v, const OptimPiece& p) {
  for (size_t i = 0; i < p.count; i += kCodeBlock) {
    const CodedBlock block = block_at(p, i);
    decode_block(m + i, v + i, block, __builtin_fabsf(block.scales[0]), block.scales[1]);
  }
}

void encode_state(const OptimPiece& p, const float* m, const float* v) {
  float first[kCodeBlock], second[kCodeBlock];
  for (size_t i = 0; i < p.count; i += kCodeBlock) {
    const CodedBlock block = block_at(p, i);
    for (size_t k = 0; k < block.count; ++k) first[k] = m[i + k], second[k] = v[i + k];
    encode_block(block, first, second, largest_of(first, second, block.count), Nearest{});
  }
}

template <bool adamw>
void adam_by_state(const OptimPiece& piece, const AdamFactors& f) {
  if (piece.state_dtype == DType::float32) return update<Adam<adamw>>(piece, f);
  piece.state_dtype == DType::uint8 ? update_coded<SmallAdam<adamw>>(piece, f)
                                    : update_rounded<SmallAdam<adamw>>(piece, f);
}

void adam(const OptimPiece& piece, const AdamFactors& f) {
  f.adamw ? adam_by_state<true>(piece, f) : adam_by_state<false>(piece, f);
}

void sgd(const OptimPiece& piece, const SgdFactors& f) {
  if (!f.momentum) return update<PlainSgd>(piece, f);
  f.nesterov ? update<MomentumSgd<true>>(piece, f) : update<MomentumSgd<false>>(piece, f);
}

// -- gradients in two terms

void add(float* sum, const float* grad, const void* addend, DType dtype, size_t count) {
  alignas(64) float local[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = count - begin < kBlock ? count - begin : kBlock;
    const float *first = grad + begin, *second = widened(local, addend, dtype, begin, n);
    float* to = sum + begin;
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) to[i] = first[i] + second[i];
  }
}

// -- squares of blocks of 64

ZC_INLINE double block_squares(const float* g) {
  double lane[16];
  for (int j = 0; j < 16; ++j) lane[j] = static_cast<double>(g[j]) * static_cast<double>(g[j]);  // exact
  for (int k = 16; k < 64; k += 16)
    for (int j = 0; j < 16; ++j) lane[j] += static_cast<double>(g[k + j]) * static_cast<double>(g[k + j]);
  for (int width = 8; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  return lane[0];
}

void squares(double* sums, const void* grad, DType dtype, size_t blocks) {
  alignas(64) float local[kBlock];
  constexpr size_t at_once = kBlock / 64;
  for (size_t b = 0; b < blocks; b += at_once) {
    const size_t n = blocks - b < at_once ? blocks - b : at_once;
    const float* g = widened(local, grad, dtype, b * 64, n * 64);
    for (size_t k = 0; k < n; ++k) sums[b + k] = block_squares(g + k * 64);
  }
}

}  // namespace

extern const OptimTable kOptim;
const OptimTable kOptim = {adam, sgd, update<Lion>, update<Adagrad>, split,
                           join, add, squares,      encode_state,    decode_state};

}  // namespace zcomm::optim::ZC_ISA
