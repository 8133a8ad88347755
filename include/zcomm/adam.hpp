// Fused Adam / AdamW on host memory: one pass over gradient, state (m, v) and weight; see [Note: optimizer bits].
//
// Source: Kingma & Ba 1412.6980; Loshchilov & Hutter 1711.05101; order of operations of torch.optim.AdamW.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/dtype.hpp"
#include "zcomm/exact_sum.hpp"
#include "zcomm/optim_shard.hpp"

namespace zcomm {

struct AdamParams {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
  bool adamw = true;  ///< decoupled weight decay; false: L2 term added to the gradient
  bool maximize = false;
  std::int64_t step = 1;    ///< counts from 1; bias corrections are computed in f64
  float grad_scale = 1.0f;  ///< gradients are multiplied by it first (unscale x clip x 1/accumulation)
};

/// Bytes of state: per element 8 (f32 weight), 10 (bf16 weight, split master) or 12 (f16 weight and f32 master); with
/// bf16 state 4 less; with 8-bit state 6 less, and 8 per block.
std::size_t adam_state_nbytes(DType weight, std::size_t count, DType state = DType::float32);

/// One step. Throws InvalidArgument (see OptimShard; beta out of [0,1), step < 1). `threads`: maximum number of
/// workers; 0 = all of the core's pool. squares: adds the squares of the given gradient (before grad_scale, with its
/// addend) in the same pass, as add_squares does from the beginning of each tile; NaN if one is not finite.
void adam_step(const OptimShard& shard, const AdamParams& params, int threads = 0, ExactSum* squares = nullptr);

/// Encodes f32 m and v as 8-bit state (to nearest), and decodes them; m, v: from the shard's element 0. Throws
/// InvalidArgument (see OptimShard; state_dtype not u8).
void adam_encode_state(const OptimShard& shard, const float* m, const float* v);
void adam_decode_state(const OptimShard& shard, float* m, float* v);

}  // namespace zcomm
