// What the optimizers' host sides share: checks of a shard, and its cut into pieces that lie in one tile each.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>

#include "optim/optim_table.hpp"
#include "zcomm/exact_sum.hpp"
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

/// Calls step(part) for parts of a piece that fit a cache, between the sum of their gradients' squares (null: not
/// wanted) and the output of an f16 weight.
using StepBody = std::function<void(const OptimPiece& part)>;
void step_in_parts(const OptimPiece& piece, int arrays, ExactSum* squares, const StepBody& step);

/// The whole step: `kernel` of this CPU's table over the shard. squares: see adam_step.
template <class Factors>
void run_step(const OptimShard& shard, int arrays, int threads, void (*kernel)(const OptimPiece&, const Factors&),
              const Factors& factors, ExactSum* squares) {
  struct Job {  // one reference in the lambdas: std::function then allocates nothing
    int arrays;
    void (*kernel)(const OptimPiece&, const Factors&);
    const Factors& factors;
    ExactSum* squares;
    std::mutex mutex;
  } job{arrays, kernel, factors, squares, {}};
  for_each_piece(shard, arrays, threads, [&job](const OptimPiece& piece, std::size_t) {
    if (job.squares == nullptr && piece.f16_weight == nullptr) return job.kernel(piece, job.factors);
    ExactSum mine;
    step_in_parts(piece, job.arrays, job.squares == nullptr ? nullptr : &mine,
                  [&job](const OptimPiece& part) { job.kernel(part, job.factors); });
    if (job.squares == nullptr) return;
    const std::lock_guard lock(job.mutex);
    job.squares->add(mine);
  });
}

/// The gradient's factor: negative to maximize.
inline float signed_scale(float grad_scale, bool maximize) { return maximize ? -grad_scale : grad_scale; }

}  // namespace zcomm::optim
