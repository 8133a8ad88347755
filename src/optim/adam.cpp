// adam_step, split_master, join_master: check, cut [begin, end) at tiles, share the pieces among threads.
//
// Every element is computed alone, so cuts, tiles and threads do not change the bits. Thread rule: calls on disjoint
// ranges may run at once (the pool serialises them).
#include "zcomm/adam.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "optim/optim_table.hpp"

namespace zcomm {
namespace {

using optim::AdamFactors;
using optim::AdamPiece;

constexpr std::size_t kGrain = 16384;  // elements: enough work to be worth waking a thread

std::size_t state_bytes_per_element(DType weight) { return weight == DType::bf16 ? 10 : 8; }

void check_weight(DType weight) {
  if (weight != DType::f32 && weight != DType::bf16)
    throw InvalidArgument(text("adam: weight is ", name_of(weight), "; it must be float32 or bfloat16"));
}

void check_shard(const AdamShard& shard) {
  check_weight(shard.weight_dtype);
  if (shard.begin > shard.end || shard.end > shard.count)
    throw InvalidArgument(
        text("adam: range [", shard.begin, ", ", shard.end, ") does not lie in a shard of ", shard.count, " elements"));
  if (shard.tile_count == 0) throw InvalidArgument("adam: tile_count is 0; it must be at least 1");
  if (shard.weight_dtype == DType::bf16 && shard.count > shard.tile_count && shard.tile_count % 2 != 0)
    throw InvalidArgument(
        text("adam: tile_count ", shard.tile_count, " is odd; tiles of a bfloat16 weight hold an even number"));
  if (shard.begin == shard.end) return;
  if (shard.weight == nullptr || shard.state == nullptr)
    throw InvalidArgument(
        text("adam: ", shard.weight == nullptr ? "weight" : "state", " is null, count ", shard.count));
  if (reinterpret_cast<std::uintptr_t>(shard.state) % alignof(float) != 0)
    throw InvalidArgument(text("adam: state at ", static_cast<const void*>(shard.state), " is not aligned to 4 bytes"));
}

void check_params(const AdamShard& shard, const AdamParams& params) {
  if (shard.grad_dtype != DType::f32 && shard.grad_dtype != DType::bf16 && shard.grad_dtype != DType::f16)
    throw InvalidArgument(
        text("adam: grad is ", name_of(shard.grad_dtype), "; it must be float32, bfloat16 or float16"));
  if (shard.grad == nullptr && shard.begin != shard.end)
    throw InvalidArgument(text("adam: grad is null, count ", shard.count));
  for (const double beta : {params.beta1, params.beta2})
    if (!(beta >= 0.0 && beta < 1.0)) throw InvalidArgument(text("adam: beta ", beta, " is not in [0, 1)"));
  if (params.step < 1) throw InvalidArgument(text("adam: step ", params.step, " is less than 1; steps count from 1"));
}

AdamFactors factors_of(const AdamParams& p) {
  const auto step = static_cast<double>(p.step);
  const double bias1 = 1.0 - std::pow(p.beta1, step), bias2 = 1.0 - std::pow(p.beta2, step);
  return {.grad_scale = p.maximize ? -p.grad_scale : p.grad_scale,
          .decay = static_cast<float>(1.0 - p.lr * p.weight_decay),
          .l2 = static_cast<float>(p.weight_decay),
          .one_minus_beta1 = static_cast<float>(1.0 - p.beta1),
          .beta2 = static_cast<float>(p.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - p.beta2),
          .root_bias2 = static_cast<float>(std::sqrt(bias2)),
          .eps = static_cast<float>(p.eps),
          .step_size = static_cast<float>(p.lr / bias1),
          .adamw = p.adamw};
}

/// Calls body(piece, first element) for each part of [begin, end) that lies in one tile.
template <class Body>
void for_each_piece(const AdamShard& shard, std::size_t begin, std::size_t end, const Body& body) {
  const bool split = shard.weight_dtype == DType::bf16;
  while (begin < end) {
    const std::size_t tile_begin = begin / shard.tile_count * shard.tile_count;
    const std::size_t tile = std::min(shard.tile_count, shard.count - tile_begin);
    const std::size_t stop = std::min(end, tile_begin + tile), offset = begin - tile_begin;
    std::byte* state = shard.state + tile_begin * state_bytes_per_element(shard.weight_dtype);
    auto* m = reinterpret_cast<float*>(state);
    auto* lo = reinterpret_cast<std::int16_t*>(state + 2 * tile * sizeof(float));
    AdamPiece piece{.weight = static_cast<std::byte*>(shard.weight) + begin * size_of(shard.weight_dtype),
                    .lo = split ? lo + offset : nullptr,
                    .m = m + offset,
                    .v = m + tile + offset,
                    .grad = nullptr,
                    .grad_dtype = shard.grad_dtype,
                    .count = stop - begin};
    if (shard.grad != nullptr)
      piece.grad = static_cast<const std::byte*>(shard.grad) + begin * size_of(shard.grad_dtype);
    body(piece, begin);
    begin = stop;
  }
}

template <class Body>
void for_each_piece_threaded(const AdamShard& shard, int threads, const Body& body) {
  ThreadPool::shared().parallel_for(shard.end - shard.begin, kGrain, threads, [&](std::size_t begin, std::size_t end) {
    for_each_piece(shard, shard.begin + begin, shard.begin + end, body);
  });
}

void check_master(const AdamShard& shard, const float* master, const char* who) {
  check_shard(shard);
  if (shard.weight_dtype != DType::bf16)
    throw InvalidArgument(text(who, ": weight is ", name_of(shard.weight_dtype), "; only bfloat16 weights are split"));
  if (master == nullptr && shard.begin != shard.end) throw InvalidArgument(text(who, ": master is null"));
}

}  // namespace

std::size_t adam_state_nbytes(DType weight, std::size_t count) {
  check_weight(weight);
  return count * state_bytes_per_element(weight);
}

void adam_step(const AdamShard& shard, const AdamParams& params, int threads) {
  check_shard(shard);
  check_params(shard, params);
  const AdamFactors factors = factors_of(params);
  const auto& table = optim::current_optim_table();
  for_each_piece_threaded(shard, threads, [&](const AdamPiece& piece, std::size_t) { table.adam(piece, factors); });
}

void split_master(const AdamShard& shard, const float* master) {
  check_master(shard, master, "split_master");
  const auto& table = optim::current_optim_table();
  for_each_piece_threaded(shard, 0, [&](const AdamPiece& piece, std::size_t begin) {
    table.split(static_cast<std::uint16_t*>(piece.weight), piece.lo, master + begin, piece.count);
  });
}

void join_master(const AdamShard& shard, float* master) {
  check_master(shard, master, "join_master");
  const auto& table = optim::current_optim_table();
  for_each_piece_threaded(shard, 0, [&](const AdamPiece& piece, std::size_t begin) {
    table.join(master + begin, static_cast<const std::uint16_t*>(piece.weight), piece.lo, piece.count);
  });
}

}  // namespace zcomm
