// Shared by the optimizers' host sides: checks of a shard, and the cut of one or many into pieces within one tile each.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <span>

#include "optim/optim_table.hpp"
#include "zcomm/exact_sum.hpp"
#include "zcomm/optim_shard.hpp"

namespace zcomm::optim {

/// Bytes of state per element: `arrays` of `state` and a split master's remainder; state_nbytes: of `count` elements,
/// with the scales of 8-bit state. Throws InvalidArgument that begins with `call` for an unsupported dtype of weight or
/// state.
std::size_t state_bytes_per_element(const char* call, DType weight, int arrays, DType state = DType::float32);
std::size_t state_nbytes(const char* call, DType weight, int arrays, std::size_t count, DType state);

/// Throws InvalidArgument that begins with `call`, as documented at OptimShard. check_step also checks the gradients;
/// rounds_state: the kernel supports bf16 and 8-bit state.
void check_shard(const char* call, const OptimShard& shard, int arrays);
void check_step(const char* call, const OptimShard& shard, int arrays, bool rounds_state = false);
void check_beta(const char* call, double beta);
void check_squares(const void* grad, DType dtype, std::size_t count);
/// add_squares without the checks, on this thread.
void add_squares_alone(ExactSum& sum, const void* grad, DType dtype, std::size_t count);

/// A checked shard among several that are processed together. at: its first element in their total count; each takes
/// whole blocks of kStateBlock there, so that no cut falls into a block.
struct CheckedShard {
  OptimShard shard;
  int arrays;
  std::size_t at = 0;
  std::size_t end() const { return at + (shard.end - shard.begin + kStateBlock - 1) / kStateBlock * kStateBlock; }
};

/// Calls body(begin, end) for parts of [0, shards.back().end()), on at most `threads` threads (0: all of the core's
/// pool).
using PartBody = std::function<void(std::size_t begin, std::size_t end)>;
void share_out(std::span<const CheckedShard> shards, int threads, const PartBody& body);

/// Calls body(piece, shard index, first element) for the pieces of a part, cut at the ends of tiles.
using PieceBody = std::function<void(const OptimPiece& piece, std::size_t which, std::size_t begin)>;
void for_each_piece(std::span<const CheckedShard> shards, std::size_t begin, std::size_t end, const PieceBody& body);
/// The whole of one shard.
void for_each_piece(const OptimShard& shard, int arrays, int threads, const PieceBody& body);

/// Calls step(part) for parts of a piece that fit a cache, between the sum of their gradients' squares (null: none) and
/// the output of an f16 weight. An addend has been added to the part's gradient.
using StepBody = std::function<void(const OptimPiece& part)>;
void step_in_parts(const OptimPiece& piece, int arrays, ExactSum* squares, const StepBody& step);

/// The whole step: `kernel` of this CPU's table over all shards, factors[i] those of shards[i]. squares: see adam_step.
template <class Factors>
void run_step(std::span<const CheckedShard> shards, const Factors* factors, int threads,
              void (*kernel)(const OptimPiece&, const Factors&), ExactSum* squares) {
  struct Job {  // one reference in the lambdas: std::function then allocates nothing
    std::span<const CheckedShard> shards;
    const Factors* factors;
    void (*kernel)(const OptimPiece&, const Factors&);
    ExactSum* squares;
    std::mutex mutex;
  } job{shards, factors, kernel, squares, {}};
  share_out(shards, threads, [&job](std::size_t part_begin, std::size_t part_end) {
    ExactSum mine;
    for_each_piece(job.shards, part_begin, part_end,
                   [&job, &mine](const OptimPiece& piece, std::size_t which, std::size_t) {
                     const Factors& f = job.factors[which];
                     if (job.squares == nullptr && piece.f16_weight == nullptr && piece.addend == nullptr)
                       return job.kernel(piece, f);
                     step_in_parts(piece, job.shards[which].arrays, job.squares == nullptr ? nullptr : &mine,
                                   [&job, &f](const OptimPiece& part) { job.kernel(part, f); });
                   });
    if (job.squares == nullptr) return;
    const std::lock_guard lock(job.mutex);
    job.squares->add(mine);
  });
}

/// The gradient's factor: negative to maximize.
inline float signed_scale(float grad_scale, bool maximize) { return maximize ? -grad_scale : grad_scale; }

}  // namespace zcomm::optim
