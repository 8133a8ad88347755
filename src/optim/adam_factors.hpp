// Adam's factors of a step, in f64 and rounded to f32 once: on the host, and on the device where it keeps the count.
//
// The power is a product of squares, not a library's: each C library and each device has last bits of its own.
#pragma once

#include "optim/optim_table.hpp"
#include "zcomm/adam.hpp"

#ifndef ZC_INLINE  // CUDA sources have their own
#define ZC_INLINE inline __attribute__((always_inline))
#endif

namespace zcomm::optim {

ZC_INLINE double power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1, base = base * base)
    if ((exponent & 1) != 0) result = result * base;
  return result;
}

/// signed_scale: grad_scale, negative to maximize; of p it is not read, nor is the step.
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
  return f;
}

}  // namespace zcomm::optim
