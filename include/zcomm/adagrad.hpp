// Fused Adagrad on host memory: one pass over gradient, state (sum of squares) and weight; see [Note: optimizer bits].
//
// Source: Duchi, Hazan, Singer 2011; order of operations of torch.optim.Adagrad.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/dtype.hpp"
#include "zcomm/exact_sum.hpp"
#include "zcomm/optim_shard.hpp"

namespace zcomm {

struct AdagradParams {
  double lr = 1e-2, lr_decay = 0.0, weight_decay = 0.0, eps = 1e-10;
  bool maximize = false;
  std::int64_t step = 1;    ///< counts from 1; the rate is lr / (1 + (step - 1) * lr_decay), computed in f64
  float grad_scale = 1.0f;  ///< gradients are multiplied by it first (unscale x clip x 1/accumulation)
};

/// Bytes of state per element: 4 (f32 weight) or 6 (bf16 weight, split master).
std::size_t adagrad_state_nbytes(DType weight, std::size_t count);

/// One step. Throws InvalidArgument (see OptimShard; step < 1). `threads`: as in adam_step.
void adagrad_step(const OptimShard& shard, const AdagradParams& params, int threads = 0, ExactSum* squares = nullptr);

}  // namespace zcomm
