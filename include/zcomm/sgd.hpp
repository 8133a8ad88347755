// Fused SGD with momentum on host memory: one pass over gradient, state and weight; see [Note: optimizer bits].
//
// State: the momentum buffer, or no array at all.
// Source: Sutskever et al. 2013 (Nesterov); order of operations of torch.optim.SGD.
#pragma once

#include <cstddef>

#include "zcomm/dtype.hpp"
#include "zcomm/exact_sum.hpp"
#include "zcomm/optim_shard.hpp"

namespace zcomm {

struct SgdParams {
  double lr = 1e-3, momentum = 0.0, dampening = 0.0, weight_decay = 0.0;
  bool nesterov = false, maximize = false;
  bool buffer = false;      ///< the state has a momentum buffer; not touched while momentum is 0
  bool first = false;       ///< the buffer is zero and becomes the gradient, not dampened (torch's first step)
  float grad_scale = 1.0f;  ///< gradients are multiplied by it first (unscale x clip x 1/accumulation)
};

/// Bytes of state: 4 per element with a buffer, and 2 for a bf16 weight's remainder.
std::size_t sgd_state_nbytes(DType weight, bool buffer, std::size_t count);

/// One step. Throws InvalidArgument (see OptimShard; momentum without buffer). `threads`: as in adam_step.
void sgd_step(const OptimShard& shard, const SgdParams& params, int threads = 0, ExactSum* squares = nullptr);

}  // namespace zcomm
