// Fused Lion on host memory: one pass over gradient, state (m) and weight; see [Note: optimizer bits].
//
// sign(0) = 0 and sign(NaN) = NaN: a bad gradient shows in the weight at once.
// Source: Chen et al. 2302.06675, algorithm 2; weight decay decoupled.
#pragma once

#include <cstddef>

#include "zcomm/dtype.hpp"
#include "zcomm/exact_sum.hpp"
#include "zcomm/optim_shard.hpp"

namespace zcomm {

struct LionParams {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0.0;
  bool maximize = false;
  float grad_scale = 1.0f;  ///< gradients are multiplied by it first (unscale x clip x 1/accumulation)
};

/// Bytes of state per element: 4 (f32 weight) or 6 (bf16 weight, split master).
std::size_t lion_state_nbytes(DType weight, std::size_t count);

/// One step. Throws InvalidArgument (see OptimShard; beta out of [0,1)). `threads`: as in adam_step.
void lion_step(const OptimShard& shard, const LionParams& params, int threads = 0, ExactSum* squares = nullptr);

}  // namespace zcomm
