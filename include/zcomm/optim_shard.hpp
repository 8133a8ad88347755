// OptimShard: weight, gradient and state of one shard, the argument of every fused optimizer (decision D8).
//
// [Note: split master] With a bf16 weight the fp32 master is kept in two halves: the weight itself, which is the master
// rounded to nearest, and a 16-bit remainder lo = bits(master) - (bits(weight) << 16). Together they are the master
// exactly, and the model reads the weight without a copy: 2 + 2 bytes instead of 2 + 4. Exact ties round away from
// zero, not to even: a weight with an even last bit would otherwise stand for 65537 masters, one more than lo can
// distinguish. (Against master.to(bfloat16) that is one element in 131072, in the last bit.) A master that rounds to
// infinity is still kept exactly; a NaN remains a NaN, its payload cut to the weight's. A program may write another
// weight. The old lo then moves the master by half a last bit of the weight at most; next to zero and infinity, if the
// sum would be NaN, it counts as 0.
//
// [Note: state tiles] The state of a shard is stored in contiguous tiles of `tile_count` elements: the optimizer's
// arrays (f32 or bf16; Adam: m, v) and, with a split master, lo (i16), each with the tile's own count: tile t begins at
// byte t * tile_count * bytes per element, and the last tile's arrays have count - t * tile_count elements. A tile is
// one stream for the prefetcher and one extent on NVMe.
//
// [Note: optimizer bits] The same elementwise operations in the same order for every instruction set and for vector
// body and tail, no fused multiply-add: the bits do not depend on how a shard is cut, nor on the CPU. (A NaN is NaN
// everywhere; its payload is not promised.) On f32 state the order is torch.optim's. On bf16 and 8-bit state, with
// rounding many thousand times coarser, factors are combined to save operations (src/optim/arithmetic/update_rules.hpp,
// SmallAdam).
//
// [Note: stochastic rounding] bf16 state is computed in f32 and rounded stochastically, so that its mean is the f32
// value: otherwise an average that moves by less than half a last bit per step would never change. The random bits are
// a counter's hash: 16 bits for each array from (step, first_index + element), so a run can be repeated, cut and
// resumed with the same bits. An element's own step uses its state before rounding. Infinity and NaN are not changed.
//
// [Note: 8-bit state] Each array has one byte per element and an f32 scale per block of 256. Codes are relative to the
// block's largest, finer near it (src/optim/arithmetic/state_codes.hpp): for magnitudes in [1/16, 1) of it they are
// 1/32 to 1/16 apart, relatively, and twice, four times ... as far in each further 16th; m ends at 2^-28 of it, v has
// the range of m squared and is never rounded to zero. Rounding is stochastic, as above, with 8 random bits that an
// element's m and v share. The tile begins with the scales (m's and v's of each block), then m, v and lo. Tiles and
// ranges are whole blocks. A nonfinite value in m or v (or one not below 1.875 * 2^127) makes both NaN from the next
// step on, only for that element. A block is zero if its largest is below 2^-120.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/dtype.hpp"

namespace zcomm {

/// Elements [begin, end) of a shard; pointers are to the shard's element 0 (weight, grad, addend) and tile 0 (state).
/// weight: f32, bf16 or f16 (then each tile begins with an f32 master, which is authoritative). grad: f32, bf16 or f16.
/// addend: null, or f32, bf16 or f16 next to an f32 grad. Its f32 value is added to grad in the pass of the step, which
/// does not write the sum; the bits are the same as after adding it first. Only steps on the host take one.
/// `count` is the shard's length, which fixes the last tile's layout. A step throws InvalidArgument for other dtypes,
/// begin > end > count, tile_count 0, or odd with more than one tile of a bf16 weight (f32 state would not lie on
/// 4-byte boundaries); bf16 or 8-bit state of another optimizer than Adam; 8-bit state with cut blocks.
struct OptimShard {
  void* weight;
  DType weight_dtype;
  const void* grad;
  DType grad_dtype;
  std::byte* state;
  std::size_t count;
  std::size_t tile_count;
  std::size_t begin, end;
  DType state_dtype = DType::float32;  ///< of the arrays: f32, bf16 with stochastic rounding, or u8: 8-bit state
  std::uint64_t first_index = 0;       ///< stochastic rounding: number of the shard's element 0 in the whole
  const void* addend = nullptr;        ///< second term of the gradient
  DType addend_dtype = DType::float32;
};

/// Sets lo of a bf16 shard, or the master of an f16 shard, from an f32 master and writes the rounded weight; the
/// `arrays` before lo are not touched (Adam 2; Lion, Adagrad and SGD with momentum 1; plain SGD 0).
void split_master(const OptimShard& shard, const float* master, int arrays = 2);
/// The exact f32 master of a bf16 or f16 shard.
void join_master(const OptimShard& shard, float* master, int arrays = 2);

}  // namespace zcomm
