// OptimTable: the optimizer kernels of one instruction set; raw pointers only, see [Note: one definition] in
// device/cpu/kernels_table.hpp. Arguments are checked by the host sides (shard.cpp, adam.cpp, sgd.cpp, ...,
// exact_sum.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cpu_features.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm::optim {

inline constexpr std::size_t kStateBlock = 256;  ///< elements that share a scale of 8-bit state

// Factors of one step, computed in f64 and rounded to f32 once. grad_scale: negative to maximize.

/// Adam's for small state, which take fewer operations: SmallAdam of optim/arithmetic/update_rules.hpp.
struct SmallAdamFactors {
  float grad_scale, l2;  ///< not adamw
  float decay;
  float first_keep, first_gain;    ///< m = m * keep + g * gain
  float second_keep, second_gain;  ///< v = v * keep + (g * gain)^2
  float slope, eps;                ///< weight -= m / (root * slope + eps)
};

struct AdamFactors {
  float grad_scale;
  float decay;  ///< adamw: weight is multiplied by 1 - lr * weight_decay
  float l2;     ///< not adamw: weight_decay, times weight is added to the gradient
  float one_minus_beta1, beta2, one_minus_beta2;
  float inverse_root_bias2;  ///< 1 / sqrt(1 - beta2^step): inverted, because the divider limits a step in cache
  float eps;
  float step_size;  ///< lr / (1 - beta1^step)
  bool adamw;
  std::uint64_t step = 0;  ///< bf16 state: the counter of [Note: stochastic rounding]
  SmallAdamFactors small{};
};

struct SgdFactors {
  float grad_scale;
  float l2;          ///< weight_decay, times weight is added to the gradient
  float keep, gain;  ///< buffer = keep * buffer + gain * gradient
  float look_ahead;  ///< nesterov: look_ahead * buffer is added to the gradient
  float lr;
  bool momentum, nesterov;
};

struct LionFactors {
  float grad_scale;
  float decay;  ///< weight is multiplied by 1 - lr * weight_decay
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float lr;
};

struct AdagradFactors {
  float grad_scale;
  float l2;  ///< weight_decay, times weight is added to the gradient
  float eps;
  float rate;  ///< lr / (1 + (step - 1) * lr_decay)
};

/// `count` elements inside one tile. lo: null for an f32 weight. state: the optimizer's arrays (Adam: m, v).
/// index: the first element's, for stochastic rounding.
struct OptimPiece {
  void* weight;
  std::int16_t* lo;
  void* state[2];
  const void* grad;
  DType grad_dtype;
  std::size_t count;
  DType state_dtype = DType::float32;
  std::uint64_t index = 0;
  float* scales = nullptr;       ///< 8-bit state: of m and v, block by block; the piece begins at a block boundary
  void* f16_weight = nullptr;    ///< not for kernels: `weight` is its f32 master, from which it is written
  const void* addend = nullptr;  ///< not for kernels: added to `grad`, f32, before they read it
  DType addend_dtype = DType::float32;
};

struct OptimTable {
  void (*adam)(const OptimPiece& piece, const AdamFactors& factors);
  void (*sgd)(const OptimPiece& piece, const SgdFactors& factors);
  void (*lion)(const OptimPiece& piece, const LionFactors& factors);
  void (*adagrad)(const OptimPiece& piece, const AdagradFactors& factors);
  void (*split)(std::uint16_t* weight, std::int16_t* lo, const float* master, std::size_t count);
  void (*join)(float* master, const std::uint16_t* weight, const std::int16_t* lo, std::size_t count);
  /// sum = grad + addend, each element in f32. sum: memory of its own.
  void (*add)(float* sum, const float* grad, const void* addend, DType addend_dtype, std::size_t count);
  /// sums[b] = squares of block b of 64 elements, as described at add_squares; full blocks only.
  void (*squares)(double* sums, const void* grad, DType dtype, std::size_t blocks);
  /// 8-bit state of `piece` from and to f32; to nearest.
  void (*encode_state)(const OptimPiece& piece, const float* m, const float* v);
  void (*decode_state)(float* m, float* v, const OptimPiece& piece);
};

/// Throws Unsupported if the CPU lacks it. Results of all tables are bitwise equal.
const OptimTable& optim_table(Isa isa);
const OptimTable& current_optim_table();

}  // namespace zcomm::optim
