// Adam's factors of a step, in f64 and rounded to f32 once: on the host, or on the device if it keeps the step count.
//
// The power is a product of squares, not a library call: C libraries and devices differ in the last bits.
#pragma once

#include "optim/optim_table.hpp"
#include "zcomm/adam.hpp"

#ifndef ZC_INLINE  // CUDA sources define their own
#define ZC_INLINE inline __attribute__((always_inline))
#endif

namespace zcomm::optim {

ZC_INLINE double power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1, base = base * base)
    if ((exponent & 1) != 0) result = result * base;
  return result;
}

ZC_INLINE SmallAdamFactors small_adam_factors(const AdamFactors& f) {
  const double one_minus_beta1 = static_cast<double>(f.one_minus_beta1), scale = static_cast<double>(f.grad_scale);
  const double gain = __builtin_sqrt(static_cast<double>(f.one_minus_beta2)), step = static_cast<double>(f.step_size);
  const bool still = step < 1e-30;  // m / infinity, because a slope would give 0 * infinity
  SmallAdamFactors small{};
  small.grad_scale = f.grad_scale;
  small.l2 = f.l2;
  small.decay = f.decay;
  small.first_keep = static_cast<float>(1.0 - one_minus_beta1);
  small.first_gain = static_cast<float>(f.adamw ? one_minus_beta1 * scale : one_minus_beta1);
  small.second_keep = f.beta2;
  small.second_gain = static_cast<float>(f.adamw ? gain * scale : gain);
  small.slope = still ? 0.0f : static_cast<float>(static_cast<double>(f.inverse_root_bias2) / step);
  small.eps = still ? __builtin_inff() : static_cast<float>(static_cast<double>(f.eps) / step);
  return small;
}

/// signed_scale: grad_scale, negative to maximize; p.grad_scale and p.step are not read.
ZC_INLINE AdamFactors adam_factors(const AdamParams& p, double lr, float signed_scale, std::uint64_t step) {
  const double bias1 = 1.0 - power(p.beta1, step), bias2 = 1.0 - power(p.beta2, step);
  AdamFactors f{};
  f.grad_scale = signed_scale;
  f.decay = static_cast<float>(1.0 - lr * p.weight_decay);
  f.l2 = static_cast<float>(p.weight_decay);
  f.one_minus_beta1 = static_cast<float>(1.0 - p.beta1);
  f.beta2 = static_cast<float>(p.beta2);
  f.one_minus_beta2 = static_cast<float>(1.0 - p.beta2);
  f.inverse_root_bias2 = static_cast<float>(1.0 / __builtin_sqrt(bias2));
  f.eps = static_cast<float>(p.eps);
  f.step_size = static_cast<float>(lr / bias1);
  f.adamw = p.adamw;
  f.step = step;
  f.small = small_adam_factors(f);
  return f;
}

}  // namespace zcomm::optim
