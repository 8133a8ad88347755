// The optimizers' arithmetic on one element: included by optim/cpu/optim_body.hpp once per instruction set.
//
// A rule takes the weight, the gradient and its state by reference (`arrays` of them; the rest is unused) and returns
// the new weight. Factors come rounded to f32 once; the order of operations is torch.optim's, single tensor, except
// SmallAdam's.
#pragma once

#include "device/convert_body.hpp"
#include "optim/optim_table.hpp"

namespace zcomm::optim::ZC_ISA {
namespace {

/// The gradient with weight decay. Without decay the weight is not read, because 0 times an infinite weight is NaN.
ZC_INLINE float with_decay(float g, float w, float l2) { return l2 != 0.0f ? g + l2 * w : g; }

template <bool adamw>
struct Adam {
  using Factors = AdamFactors;
  static constexpr int arrays = 2;
  static constexpr bool decoupled = adamw;
  static ZC_INLINE float update(float w, float g, float& m_out, float& v_out, const Factors& f) {
    g = g * f.grad_scale;
    if constexpr (adamw) {
      w = w * f.decay;
    } else {
      g = with_decay(g, w, f.l2);
    }
    const float m = m_out + f.one_minus_beta1 * (g - m_out);
    const float v = v_out * f.beta2 + f.one_minus_beta2 * g * g;
    m_out = m;
    v_out = v;
    const float denominator = __builtin_sqrtf(v) * f.inverse_root_bias2 + f.eps;
    return w - f.step_size * m / denominator;
  }
};

/// Adam on state with a rounding error far above the effect of the order of operations: bias corrections and step size
/// are in the denominator, gradient scale and betas in one factor each.
template <bool adamw>
struct SmallAdam {
  using Factors = SmallAdamFactors;
  static constexpr int arrays = 2;
  static constexpr bool decoupled = adamw;

  static ZC_INLINE float update(float w, float g, float& m_out, float& v_out, const Factors& f) {
    if constexpr (adamw) {
      w = w * f.decay;
    } else {
      g = with_decay(g * f.grad_scale, w, f.l2);
    }
    const float root = g * f.second_gain;
    const float m = m_out * f.first_keep + g * f.first_gain;
    const float v = v_out * f.second_keep + root * root;
    m_out = m;
    v_out = v;
    return w - m / (__builtin_sqrtf(v) * f.slope + f.eps);
  }
};

struct PlainSgd {
  using Factors = SgdFactors;
  static constexpr int arrays = 0;
  static ZC_INLINE float update(float w, float g, float&, float&, const Factors& f) {
    g = with_decay(g * f.grad_scale, w, f.l2);
    return w - f.lr * g;
  }
};

template <bool nesterov>
struct MomentumSgd {
  using Factors = SgdFactors;
  static constexpr int arrays = 1;
  static ZC_INLINE float update(float w, float g, float& buffer, float&, const Factors& f) {
    g = with_decay(g * f.grad_scale, w, f.l2);
    const float b = buffer * f.keep + f.gain * g;
    buffer = b;
    return w - f.lr * (nesterov ? g + f.look_ahead * b : b);
  }
};

struct Lion {
  using Factors = LionFactors;
  static constexpr int arrays = 1;
  static ZC_INLINE float update(float w, float g, float& m_out, float&, const Factors& f) {
    g = g * f.grad_scale;
    const float c = m_out * f.beta1 + f.one_minus_beta1 * g;
    const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c;  // 0 and NaN are their own
    m_out = m_out * f.beta2 + f.one_minus_beta2 * g;
    return w * f.decay - f.lr * sign;
  }
};

struct Adagrad {
  using Factors = AdagradFactors;
  static constexpr int arrays = 1;
  static ZC_INLINE float update(float w, float g, float& sum_out, float&, const Factors& f) {
    g = with_decay(g * f.grad_scale, w, f.l2);
    const float sum = sum_out + g * g;
    sum_out = sum;
    return w - f.rate * g / (__builtin_sqrtf(sum) + f.eps);
  }
};

}  // namespace
}  // namespace zcomm::optim::ZC_ISA
