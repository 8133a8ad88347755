// Fused Adam / AdamW on host memory: one pass over gradient, state and weight (decision D8).
//
// [Note: split master] With a bf16 weight the fp32 master is kept in two halves: the weight itself, which is the master
// rounded to nearest, and a 16-bit remainder lo = bits(master) - (bits(weight) << 16). Together they are the master
// exactly, and the weight is at once what the model reads: 2 + 2 bytes instead of 2 + 4. Exact ties go away from zero,
// not to even: a weight with an even last bit would otherwise stand for 65537 masters, one more than lo can tell apart.
// (Against master.to(bfloat16) that is one element in 131072, in the last bit.) A master that rounds to infinity is
// still kept exactly; a NaN stays a NaN, its payload cut to the weight's.
//
// [Note: state tiles] State of a shard lies in tiles of `tile_count` elements, back to back: m (f32), v (f32) and, with
// a split master, lo (i16), each of the tile's own count: tile t begins at byte t * tile_count * bytes per element, and
// the last tile's arrays have count - t * tile_count elements. A tile is one stream for the prefetcher and one extent
// on NVMe.
//
// Arithmetic: the same elementwise operations in the same order for every instruction set and for vector body and tail,
// no fused multiply-add: the bits do not depend on how a shard is cut.
// Source: Kingma & Ba 1412.6980; Loshchilov & Hutter 1711.05101; order of operations of torch.optim.AdamW.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/dtype.hpp"

namespace zcomm {

struct AdamParams {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
  bool adamw = true;  ///< decoupled weight decay; false: L2 term added to the gradient
  bool maximize = false;
  std::int64_t step = 1;    ///< counts from 1; bias corrections are computed in f64
  float grad_scale = 1.0f;  ///< gradients are multiplied by it first (unscale x clip x 1/accumulation)
};

/// Bytes of state per element: 8 (f32 weight) or 10 (bf16 weight, split master).
std::size_t adam_state_nbytes(DType weight, std::size_t count);

/// Elements [begin, end) of a shard; pointers are to the shard's element 0 (weight, grad) and tile 0 (state).
/// weight: f32 or bf16. grad: f32, bf16 or f16. `count` is the shard's length, which fixes the last tile's layout.
struct AdamShard {
  void* weight;
  DType weight_dtype;
  const void* grad;
  DType grad_dtype;
  std::byte* state;
  std::size_t count;
  std::size_t tile_count;
  std::size_t begin, end;
};

/// One step. Throws InvalidArgument (dtypes, begin > end > count, beta out of [0,1), step < 1; tile_count 0, or odd
/// with more than one tile of a bf16 weight: f32 state would not lie on 4-byte boundaries). `threads`: workers to use
/// at most; 0 = all of the core's pool.
void adam_step(const AdamShard& shard, const AdamParams& params, int threads = 0);

/// Sets lo of a bf16 shard from an f32 master and writes the rounded weight; m = v = 0 are left alone.
void split_master(const AdamShard& shard, const float* master);
/// The exact f32 master of a bf16 shard.
void join_master(const AdamShard& shard, float* master);

}  // namespace zcomm
