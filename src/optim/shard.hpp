// What the optimizers' host sides share: checks of a shard, and its cut into pieces that lie in one tile each.
#pragma once

#include <cstddef>
#include <functional>

#include "optim/optim_table.hpp"
#include "zcomm/optim_shard.hpp"

namespace zcomm::optim {

/// Bytes of state per element: `arrays` of `state` and a split master's remainder; state_nbytes: of `count` elements,
/// with the scales of 8-bit state.
/// Throws InvalidArgument that begins with `who` for a weight or state of a dtype that is not supported.
std::size_t state_bytes_per_element(const char* who, DType weight, int arrays, DType state = DType::f32);
std::size_t state_nbytes(const char* who, DType weight, int arrays, std::size_t count, DType state);

/// Throws InvalidArgument that begins with `who`, as documented at OptimShard. check_step also checks the gradient;
/// rounds_state: the kernel knows bf16 and 8-bit state.
void check_shard(const char* who, const OptimShard& shard, int arrays);
void check_step(const char* who, const OptimShard& shard, int arrays, bool rounds_state = false);
void check_beta(const char* who, double beta);

/// Calls body(piece, first element) for parts of [begin, end) that lie in one tile, on at most `threads` threads (0:
/// all of the core's pool). The shard must have been checked.
using PieceBody = std::function<void(const OptimPiece& piece, std::size_t begin)>;
void for_each_piece(const OptimShard& shard, int arrays, int threads, const PieceBody& body);

/// The whole step: `kernel` of this CPU's table over the shard.
template <class Factors>
void run_step(const OptimShard& shard, int arrays, int threads, void (*kernel)(const OptimPiece&, const Factors&),
              const Factors& factors) {
  for_each_piece(shard, arrays, threads,
                 [kernel, &factors](const OptimPiece& piece, std::size_t) { kernel(piece, factors); });
}

/// The gradient's factor: negative to maximize.
inline float signed_scale(float grad_scale, bool maximize) { return maximize ? -grad_scale : grad_scale; }

}  // namespace zcomm::optim
