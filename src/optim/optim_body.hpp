// Adam, split master and block squares, written once as loops that the compiler vectorises; see [Note: one definition].
//
// 16-bit gradients are widened into a block in L1 first, so one loop serves all gradient types. Source of the order of
// operations: torch.optim.AdamW, single tensor.
#pragma once

#include "device/convert_body.hpp"
#include "optim/optim_table.hpp"

namespace zcomm::optim::ZC_ISA {
namespace {

using namespace device::ZC_ISA;
using std::int16_t;

constexpr size_t kBlock = 1024;

// -- [Note: split master]

ZC_INLINE float join_one(u16 weight, int16_t lo) {
  return float_of((static_cast<u32>(weight) << 16) + static_cast<u32>(static_cast<std::int32_t>(lo)));
}

ZC_INLINE u16 high_half(u32 bits) {
  const u32 quiet = (bits >> 16) | 0x40u;
  return static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : (bits + 0x8000u) >> 16);
}

/// bits(master) - (weight << 16) is the low half, read as a signed number.
ZC_INLINE int16_t low_half(u32 bits) {
  const u32 low = (bits & 0x7fffffffu) > 0x7f800000u ? 0u : bits;
  return static_cast<int16_t>(static_cast<u16>(low));
}

void split(u16* weight, int16_t* lo, const float* master, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    const u32 bits = bits_of(master[i]);
    weight[i] = high_half(bits);
    lo[i] = low_half(bits);
  }
}

void join(float* master, const u16* weight, const int16_t* lo, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) master[i] = join_one(weight[i], lo[i]);
}

// -- Adam

template <bool adamw>
ZC_INLINE float adam_one(float w, float& m_out, float& v_out, float g, const AdamFactors& f) {
  g = g * f.grad_scale;
  if constexpr (adamw) {
    w = w * f.decay;
  } else {
    g = g + f.l2 * w;
  }
  const float m = m_out + f.one_minus_beta1 * (g - m_out);
  const float v = v_out * f.beta2 + f.one_minus_beta2 * g * g;
  m_out = m;
  v_out = v;
  const float denominator = __builtin_sqrtf(v) / f.root_bias2 + f.eps;
  return w - f.step_size * m / denominator;
}

template <bool adamw>
void adam_f32(float* w, float* m, float* v, const float* g, size_t n, const AdamFactors& factors) {
  const AdamFactors f = factors;
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) w[i] = adam_one<adamw>(w[i], m[i], v[i], g[i], f);
}

template <bool adamw>
void adam_bf16(u16* w, int16_t* lo, float* m, float* v, const float* g, size_t n, const AdamFactors& factors) {
  const AdamFactors f = factors;
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    const u32 bits = bits_of(adam_one<adamw>(join_one(w[i], lo[i]), m[i], v[i], g[i], f));
    w[i] = high_half(bits);
    lo[i] = low_half(bits);
  }
}

/// Gradient elements [begin, begin + n) as f32, in `local` where they must be widened.
const float* widened(float* local, const void* grad, DType dtype, size_t begin, size_t n) {
  if (dtype == DType::f32) return static_cast<const float*>(grad) + begin;
  const u16* half = static_cast<const u16*>(grad) + begin;
  dtype == DType::bf16 ? widen_bf16(local, half, n) : widen_f16(local, half, n);
  return local;
}

template <bool adamw>
void adam_blocks(const AdamPiece& p, const AdamFactors& f) {
  alignas(64) float local[kBlock];
  for (size_t i = 0; i < p.count; i += kBlock) {
    const size_t n = p.count - i < kBlock ? p.count - i : kBlock;
    const float* g = widened(local, p.grad, p.grad_dtype, i, n);
    if (p.lo == nullptr) {
      adam_f32<adamw>(static_cast<float*>(p.weight) + i, p.m + i, p.v + i, g, n, f);
    } else {
      adam_bf16<adamw>(static_cast<u16*>(p.weight) + i, p.lo + i, p.m + i, p.v + i, g, n, f);
    }
  }
}

void adam(const AdamPiece& piece, const AdamFactors& factors) {
  factors.adamw ? adam_blocks<true>(piece, factors) : adam_blocks<false>(piece, factors);
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
const OptimTable kOptim = {adam, split, join, squares};

}  // namespace zcomm::optim::ZC_ISA
