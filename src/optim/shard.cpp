// Checks of a shard, cutting it at tiles, sharing the pieces among threads; split_master and join_master.
//
// Every element is computed independently, so cuts, tiles and threads do not change the bits. Thread rule: calls on
// disjoint ranges may run at once (the pool serialises them).
#include "optim/shard.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "device/kernels.hpp"

namespace zcomm::optim {
namespace {

constexpr std::size_t kGrain = 16384;  // elements: enough work to be worth waking a thread; whole blocks
static_assert(kGrain % kStateBlock == 0);

std::size_t bytes_per_element(DType weight, int arrays, DType state) {
  const std::size_t master = weight == DType::bfloat16  ? sizeof(std::int16_t)
                             : weight == DType::float16 ? sizeof(float)
                                                        : 0;
  return static_cast<std::size_t>(arrays) * size_of(state) + master;
}

std::size_t scales_nbytes(DType state, std::size_t count, int arrays) {
  return state == DType::uint8
             ? (count + kStateBlock - 1) / kStateBlock * static_cast<std::size_t>(arrays) * sizeof(float)
             : 0;
}

OptimPiece piece_of(const OptimShard& shard, int arrays, std::size_t begin, std::size_t end) {
  const std::size_t tile_begin = begin / shard.tile_count * shard.tile_count, offset = begin - tile_begin;
  const std::size_t tile = std::min(shard.tile_count, shard.count - tile_begin);
  OptimPiece piece{.weight = static_cast<std::byte*>(shard.weight) + begin * size_of(shard.weight_dtype),
                   .lo = nullptr,
                   .state = {nullptr, nullptr},
                   .grad = nullptr,
                   .grad_dtype = shard.grad_dtype,
                   .count = std::min(end, tile_begin + tile) - begin,
                   .state_dtype = shard.state_dtype,
                   .index = shard.first_index + begin};
  if (shard.grad != nullptr) piece.grad = static_cast<const std::byte*>(shard.grad) + begin * size_of(shard.grad_dtype);
  if (shard.addend != nullptr) {
    piece.addend = static_cast<const std::byte*>(shard.addend) + begin * size_of(shard.addend_dtype);
    piece.addend_dtype = shard.addend_dtype;
  }
  if (shard.state == nullptr) return piece;  // plain SGD in f32
  std::byte* state = shard.state + tile_begin * bytes_per_element(shard.weight_dtype, arrays, shard.state_dtype) +
                     scales_nbytes(shard.state_dtype, tile_begin, arrays);
  if (shard.weight_dtype == DType::float16) {
    piece.f16_weight = piece.weight;
    piece.weight = reinterpret_cast<float*>(state) + offset;
    state += tile * sizeof(float);
  }
  if (shard.state_dtype == DType::uint8) {
    piece.scales = reinterpret_cast<float*>(state) + offset / kStateBlock * static_cast<std::size_t>(arrays);
    state += scales_nbytes(shard.state_dtype, tile, arrays);
  }
  const std::size_t item = size_of(shard.state_dtype);
  for (int k = 0; k < arrays; ++k, state += tile * item) piece.state[k] = state + offset * item;
  if (shard.weight_dtype == DType::bfloat16) piece.lo = reinterpret_cast<std::int16_t*>(state) + offset;
  return piece;
}

/// 8-bit state: ranges and tiles are whole blocks, because a block's elements share their scale.
void check_blocks(const char* call, const OptimShard& shard) {
  const auto whole = [&](std::size_t at) { return at % kStateBlock == 0 || at == shard.count; };
  if (!whole(shard.begin) || !whole(shard.end))
    throw InvalidArgument(text(call, ": range [", shard.begin, ", ", shard.end, ") cuts a block of ", kStateBlock,
                               " elements of uint8 state"));
  if (shard.count > shard.tile_count && shard.tile_count % kStateBlock != 0)
    throw InvalidArgument(text(call, ": tile_count ", shard.tile_count, " is not a multiple of ", kStateBlock,
                               ", the block of uint8 state"));
}

void check_grad(const char* call, const char* name, DType dtype) {
  if (dtype != DType::float32 && dtype != DType::bfloat16 && dtype != DType::float16)
    throw InvalidArgument(text(call, ": ", name, " is ", name_of(dtype), "; it must be float32, bfloat16 or float16"));
}

/// Makes the gradient of `part` the sum of its terms, in `sums`.
void add_terms(OptimPiece& part, float* sums) {
  current_optim_table().add(sums, static_cast<const float*>(part.grad), part.addend, part.addend_dtype, part.count);
  part.grad = sums;
  part.addend = nullptr;
}

void check_master(const char* call, const OptimShard& shard, const float* master, int arrays) {
  if (arrays < 0 || arrays > 2) throw InvalidArgument(text(call, ": arrays ", arrays, " is not 0, 1 or 2"));
  check_shard(call, shard, arrays);
  if (shard.weight_dtype == DType::float32)
    throw InvalidArgument(text(call, ": weight is float32; only bfloat16 and float16 weights have a master"));
  if (master == nullptr && shard.begin != shard.end) throw InvalidArgument(text(call, ": master is null"));
}

}  // namespace

std::size_t state_bytes_per_element(const char* call, DType weight, int arrays, DType state) {
  if (weight != DType::float32 && weight != DType::bfloat16 && weight != DType::float16)
    throw InvalidArgument(text(call, ": weight is ", name_of(weight), "; it must be float32, bfloat16 or float16"));
  if (state != DType::float32 && state != DType::bfloat16 && state != DType::uint8)
    throw InvalidArgument(text(call, ": state is ", name_of(state), "; it must be float32, bfloat16 or uint8"));
  return bytes_per_element(weight, arrays, state);
}

std::size_t state_nbytes(const char* call, DType weight, int arrays, std::size_t count, DType state) {
  return count * state_bytes_per_element(call, weight, arrays, state) + scales_nbytes(state, count, arrays);
}

void check_shard(const char* call, const OptimShard& shard, int arrays) {
  const std::size_t per_element = state_bytes_per_element(call, shard.weight_dtype, arrays, shard.state_dtype);
  if (shard.begin > shard.end || shard.end > shard.count)
    throw InvalidArgument(text(call, ": range [", shard.begin, ", ", shard.end, ") does not lie in a shard of ",
                               shard.count, " elements"));
  if (shard.tile_count == 0) throw InvalidArgument(text(call, ": tile_count is 0; it must be at least 1"));
  if (shard.weight_dtype == DType::bfloat16 && shard.state_dtype == DType::float32 && shard.count > shard.tile_count &&
      shard.tile_count % 2 != 0)
    throw InvalidArgument(
        text(call, ": tile_count ", shard.tile_count, " is odd; tiles of a bfloat16 weight hold an even number"));
  if (shard.state_dtype == DType::uint8) check_blocks(call, shard);
  if (shard.begin == shard.end) return;
  if (shard.weight == nullptr) throw InvalidArgument(text(call, ": weight is null, count ", shard.count));
  if (shard.state == nullptr && per_element > 0)
    throw InvalidArgument(text(call, ": state is null, count ", shard.count));
  if (reinterpret_cast<std::uintptr_t>(shard.state) % alignof(float) != 0)
    throw InvalidArgument(
        text(call, ": state at ", static_cast<const void*>(shard.state), " is not aligned to 4 bytes"));
}

void check_step(const char* call, const OptimShard& shard, int arrays, bool rounds_state) {
  check_shard(call, shard, arrays);
  if (shard.state_dtype != DType::float32 && !rounds_state)
    throw InvalidArgument(text(call, ": state is ", name_of(shard.state_dtype), "; it must be float32"));
  check_grad(call, "grad", shard.grad_dtype);
  if (shard.addend != nullptr) check_grad(call, "addend", shard.addend_dtype);
  if (shard.addend != nullptr && shard.grad_dtype != DType::float32)
    throw InvalidArgument(text(call, ": grad is ", name_of(shard.grad_dtype), "; with an addend it must be float32"));
  if (shard.grad == nullptr && shard.begin != shard.end)
    throw InvalidArgument(text(call, ": grad is null, count ", shard.count));
}

void check_beta(const char* call, double beta) {
  if (!(beta >= 0.0 && beta < 1.0)) throw InvalidArgument(text(call, ": beta ", beta, " is not in [0, 1)"));
}

void share_out(std::span<const CheckedShard> shards, int threads, const PartBody& body) {
  if (!shards.empty()) ThreadPool::shared().parallel_for(shards.back().end(), kGrain, threads, body);
}

void for_each_piece(std::span<const CheckedShard> shards, std::size_t begin, std::size_t end, const PieceBody& body) {
  const auto after = [](std::size_t at, const CheckedShard& shard) { return at < shard.end(); };
  auto which = static_cast<std::size_t>(std::upper_bound(shards.begin(), shards.end(), begin, after) - shards.begin());
  for (; which < shards.size() && shards[which].at < end; ++which) {
    const OptimShard& shard = shards[which].shard;
    const std::size_t at = shards[which].at, stop = std::min(shard.end, shard.begin + (end - at));
    for (std::size_t i = shard.begin + (std::max(begin, at) - at); i < stop;) {
      const OptimPiece piece = piece_of(shard, shards[which].arrays, i, stop);
      body(piece, which, i);
      i += piece.count;
    }
  }
}

void for_each_piece(const OptimShard& shard, int arrays, int threads, const PieceBody& body) {
  struct Job {
    CheckedShard shard;
    const PieceBody& body;
  } const job{{shard, arrays}, body};
  const std::span shards(&job.shard, 1);
  share_out(shards, threads, [&job](std::size_t begin, std::size_t end) {
    for_each_piece(std::span(&job.shard, 1), begin, end, job.body);
  });
}

OptimPiece part_of(const OptimPiece& piece, int arrays, std::size_t begin, std::size_t count) {
  OptimPiece part = piece;
  const auto at = [](void* array, std::size_t nbytes) {
    return array == nullptr ? nullptr : static_cast<std::byte*>(array) + nbytes;
  };
  part.weight = at(piece.weight, begin * (piece.lo == nullptr ? sizeof(float) : sizeof(std::uint16_t)));
  if (piece.lo != nullptr) part.lo = piece.lo + begin;
  for (int k = 0; k < arrays; ++k) part.state[k] = at(piece.state[k], begin * size_of(piece.state_dtype));
  part.grad = static_cast<const std::byte*>(piece.grad) + begin * size_of(piece.grad_dtype);
  if (piece.addend != nullptr)
    part.addend = static_cast<const std::byte*>(piece.addend) + begin * size_of(piece.addend_dtype);
  part.count = count;
  part.index = piece.index + begin;
  if (piece.scales != nullptr) part.scales = piece.scales + begin / kStateBlock * static_cast<std::size_t>(arrays);
  part.f16_weight = at(piece.f16_weight, begin * sizeof(std::uint16_t));
  return part;
}

void step_in_parts(const OptimPiece& piece, int arrays, ExactSum* squares, const StepBody& step) {
  // Elements: data that one reader leaves in L1 serves the next. The readers alternate so often that memory is fetched
  // for all of them at the same time: a step out of memory took a quarter longer in parts of 4096.
  constexpr std::size_t at_once = 512;
  alignas(64) float sums[at_once];
  for (std::size_t begin = 0; begin < piece.count; begin += at_once) {
    OptimPiece part = part_of(piece, arrays, begin, std::min(at_once, piece.count - begin));
    if (part.addend != nullptr) add_terms(part, sums);
    if (squares != nullptr) add_squares_alone(*squares, part.grad, part.grad_dtype, part.count);
    step(part);
    if (part.f16_weight != nullptr)
      device::cast(part.f16_weight, DType::float16, part.weight, DType::float32, part.count);
  }
}

}  // namespace zcomm::optim

namespace zcomm {

void split_master(const OptimShard& shard, const float* master, int arrays) {
  optim::check_master("split_master", shard, master, arrays);
  const auto split = optim::current_optim_table().split;
  optim::for_each_piece(shard, arrays, 0, [split, master](const optim::OptimPiece& piece, auto, std::size_t begin) {
    if (piece.f16_weight != nullptr) {
      std::copy_n(master + begin, piece.count, static_cast<float*>(piece.weight));
      return device::cast(piece.f16_weight, DType::float16, master + begin, DType::float32, piece.count);
    }
    split(static_cast<std::uint16_t*>(piece.weight), piece.lo, master + begin, piece.count);
  });
}

void join_master(const OptimShard& shard, float* master, int arrays) {
  optim::check_master("join_master", shard, master, arrays);
  const auto join = optim::current_optim_table().join;
  optim::for_each_piece(shard, arrays, 0, [join, master](const optim::OptimPiece& piece, auto, std::size_t begin) {
    if (piece.f16_weight != nullptr) {
      std::copy_n(static_cast<const float*>(piece.weight), piece.count, master + begin);
      return;
    }
    join(master + begin, static_cast<const std::uint16_t*>(piece.weight), piece.lo, piece.count);
  });
}

}  // namespace zcomm
