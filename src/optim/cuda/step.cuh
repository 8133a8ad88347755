// An optimizer's step on the device, one chunk of a shard for a block of threads. Rules, roundings and codes are the
// ones that the CPU's kernels are built from (optim/arithmetic), so the bits are equal.
//
// Memory-bound (bytes per element: docs/internals/algorithms.md, section 4). A thread takes 4 adjacent elements:
// 16-byte loads of f32, 8-byte loads of 16-bit arrays; with 4 to 5 arrays, 40 to 64 bytes are in flight for each of
// 1024 to 2048 threads of a multiprocessor, several times the bandwidth-delay product of its share of memory. 8-bit
// state is processed by warps, because a block of 256 shares its scales: 8 elements a lane, 32 apart, so that each load
// of a warp is whole sectors whatever the alignment.
#pragma once

#define ZC_INLINE __host__ __device__ __forceinline__
#define ZC_ISA gpu
#define ZC_ISA_LEVEL 0

#include "device/cuda/convert.cuh"
#include "device/cuda/launch.cuh"
#include "optim/arithmetic/adam_factors.hpp"
#include "optim/arithmetic/split_body.hpp"
#include "optim/arithmetic/state_codes.hpp"
#include "optim/arithmetic/update_rules.hpp"
#include "optim/cuda/kernels.hpp"

namespace zcomm::optim::cuda {
namespace {

namespace rules = zcomm::optim::gpu;
using device::cuda::aligned_to;
using device::cuda::kThreads;
using device::cuda::Pack;
using rules::u16;
using rules::u32;
using rules::u64;

constexpr std::size_t kChunk = 2048;  // elements: a block of codes for each of 8 warps, two packs for each thread
constexpr int kWidth = 4;
static_assert(kChunk / (kThreads / 32) == kStateBlock);

/// Both decays in one kernel: the choice is the same for all threads, and costs nothing compared with memory.
struct Adam {
  using Factors = AdamFactors;
  static constexpr int arrays = 2;
  static __device__ __forceinline__ float update(float w, float g, float& m, float& v, const Factors& f) {
    return f.adamw ? rules::Adam<true>::update(w, g, m, v, f) : rules::Adam<false>::update(w, g, m, v, f);
  }
};

/// On bf16 state.
struct SmallAdam {
  using Factors = AdamFactors;
  static constexpr int arrays = 2;
  static __device__ __forceinline__ float update(float w, float g, float& m, float& v, const Factors& f) {
    return update(w, g, m, v, f.adamw, f.small);
  }
  static __device__ __forceinline__ float update(float w, float g, float& m, float& v, bool adamw,
                                                 const SmallAdamFactors& f) {
    return adamw ? rules::SmallAdam<true>::update(w, g, m, v, f) : rules::SmallAdam<false>::update(w, g, m, v, f);
  }
};

/// A shard's elements in chunks that lie in one tile each.
struct Chunks {
  std::size_t per_tile, first_tile, count;
};

inline Chunks chunks_of(const OptimShard& shard) {
  const std::size_t tile = shard.tile_count < shard.count ? shard.tile_count : shard.count;
  const std::size_t per_tile = (tile + kChunk - 1) / kChunk, first = shard.begin / shard.tile_count;
  if (shard.begin == shard.end) return {per_tile, first, 0};
  return {per_tile, first, ((shard.end - 1) / shard.tile_count - first + 1) * per_tile};
}

/// The work of a block of threads: `count` elements.
struct Piece {
  void* weight;  ///< f32; bf16, with `lo`; f16, with an authoritative `master`
  float* master;
  std::int16_t* lo;
  void* state[2];
  float* scales;
  const void* grad;
  std::size_t count;
  u64 index;
};

template <DType weight, DType state, int arrays>
__device__ Piece piece_of(const OptimShard& s, const Chunks& chunks, std::size_t chunk) {
  constexpr std::size_t item = state == DType::float32    ? 4
                               : state == DType::bfloat16 ? 2
                                                          : 1,
                        low = weight == DType::bfloat16 ? 2 : 0, whole = weight == DType::float16 ? 4 : 0,
                        scale = state == DType::uint8 ? arrays * sizeof(float) : 0;
  const std::size_t tile_begin = (chunks.first_tile + chunk / chunks.per_tile) * s.tile_count;
  const std::size_t rest = s.count - tile_begin, tile = s.tile_count < rest ? s.tile_count : rest;
  std::size_t begin = tile_begin + chunk % chunks.per_tile * kChunk, end = begin + kChunk;
  if (end > tile_begin + tile) end = tile_begin + tile;
  if (begin < s.begin) begin = s.begin;
  if (end > s.end) end = s.end;
  Piece p{};  // no early return of nulls, so that the compiler sees all pointers as global memory's
  p.count = begin < end ? end - begin : 0;
  const std::size_t at = begin - tile_begin;
  std::byte* data =
      s.state + tile_begin * (arrays * item + low + whole) + (tile_begin + kStateBlock - 1) / kStateBlock * scale;
  p.weight = static_cast<std::byte*>(s.weight) + begin * (weight == DType::float32 ? 4 : 2);
  if constexpr (weight == DType::float16) {
    p.master = reinterpret_cast<float*>(data) + at;
    data += tile * whole;
  }
  if constexpr (state == DType::uint8) {
    p.scales = reinterpret_cast<float*>(data) + at / kStateBlock * arrays;
    data += (tile + kStateBlock - 1) / kStateBlock * scale;
  }
  for (int k = 0; k < arrays; ++k, data += tile * item) p.state[k] = data + at * item;
  if constexpr (weight == DType::bfloat16) p.lo = reinterpret_cast<std::int16_t*>(data) + at;
  p.grad = static_cast<const std::byte*>(s.grad) + begin * (s.grad_dtype == DType::float32 ? 4 : 2);
  p.index = s.first_index + begin;
  return p;
}

// -- elements from and to memory, `width` at a time

template <class V, int width>
__device__ __forceinline__ Pack<V, width> get(const void* data, std::size_t i) {
  return static_cast<const Pack<V, width>*>(data)[i];
}
template <class V, int width>
__device__ __forceinline__ void put(void* data, std::size_t i, const Pack<V, width>& x) {
  static_cast<Pack<V, width>*>(data)[i] = x;
}

template <int width>
__device__ __forceinline__ void get_grad(float* g, const void* grad, DType dtype, std::size_t i) {
  if (dtype == DType::float32) {  // the same for all threads
    const auto x = get<float, width>(grad, i);
    for (int k = 0; k < width; ++k) g[k] = x.at[k];
    return;
  }
  const auto x = get<u16, width>(grad, i);
  for (int k = 0; k < width; ++k)
    g[k] = dtype == DType::bfloat16 ? device::cuda::from_bf16(x.at[k]) : device::cuda::from_f16(x.at[k]);
}

template <DType weight, int width>
__device__ __forceinline__ void get_weight(float* w, const Piece& p, std::size_t i) {
  if constexpr (weight == DType::bfloat16) {
    const auto high = get<u16, width>(p.weight, i);
    const auto low = get<std::int16_t, width>(p.lo, i);
    for (int k = 0; k < width; ++k) w[k] = rules::join_one(high.at[k], low.at[k]);
  } else {
    const auto x = get<float, width>(weight == DType::float16 ? static_cast<const void*>(p.master) : p.weight, i);
    for (int k = 0; k < width; ++k) w[k] = x.at[k];
  }
}

template <DType weight, int width>
__device__ __forceinline__ void put_weight(const Piece& p, std::size_t i, const float* w) {
  if constexpr (weight == DType::bfloat16) {
    Pack<u16, width> high;
    Pack<std::int16_t, width> low;
    for (int k = 0; k < width; ++k) {
      high.at[k] = rules::high_half(rules::bits_of(w[k]));
      low.at[k] = rules::low_half(rules::bits_of(w[k]));
    }
    put(p.weight, i, high);
    put(static_cast<void*>(p.lo), i, low);
  } else {
    Pack<float, width> wide;
    for (int k = 0; k < width; ++k) wide.at[k] = w[k];
    put(weight == DType::float16 ? static_cast<void*>(p.master) : p.weight, i, wide);
  }
  if constexpr (weight == DType::float16) {
    Pack<u16, width> half;
    for (int k = 0; k < width; ++k) half.at[k] = device::cuda::to_f16(w[k]);
    put(p.weight, i, half);
  }
}

/// Keys of [Note: stochastic rounding] for a chunk, which may reach beyond a multiple of 2^32 elements.
struct Keys {
  u64 high;
  rules::RoundingKey here, next;
};
template <class Factors>
__device__ Keys keys_of(const Factors& f, u64 index) {
  if constexpr (requires { f.step; })
    return {index >> 32, rules::rounding_key(f.step, index >> 32), rules::rounding_key(f.step, (index >> 32) + 1)};
  return {};
}

template <DType state, int width>
__device__ __forceinline__ void get_state(float* x, const void* data, std::size_t i) {
  if constexpr (state == DType::float32) {
    const auto in = get<float, width>(data, i);
    for (int k = 0; k < width; ++k) x[k] = in.at[k];
  } else {
    const auto in = get<u16, width>(data, i);
    for (int k = 0; k < width; ++k) x[k] = device::cuda::from_bf16(in.at[k]);
  }
}

template <DType state, int width>
__device__ __forceinline__ void put_state(void* data, std::size_t i, const float* x, const u32* chance) {
  if constexpr (state == DType::float32) {
    Pack<float, width> out;
    for (int k = 0; k < width; ++k) out.at[k] = x[k];
    put(data, i, out);
  } else {
    Pack<u16, width> out;
    for (int k = 0; k < width; ++k) out.at[k] = rules::stochastic_bf16(x[k], chance[k]);
    put(data, i, out);
  }
}

// -- the step

template <class Rule, DType weight, DType state, int width>
__device__ __forceinline__ void step_pack(const Piece& p, DType grad_dtype, const typename Rule::Factors& f,
                                          const Keys& keys, std::size_t i) {
  float g[width], w[width], a[width] = {}, b[width] = {};
  u32 first[width] = {}, second[width] = {};
  get_grad<width>(g, p.grad, grad_dtype, i);
  get_weight<weight, width>(w, p, i);
  if constexpr (Rule::arrays > 0) get_state<state, width>(a, p.state[0], i);
  if constexpr (Rule::arrays > 1) get_state<state, width>(b, p.state[1], i);
  for (int k = 0; k < width; ++k) {
    w[k] = Rule::update(w[k], g[k], a[k], b[k], f);
    if constexpr (state == DType::bfloat16) {
      const u64 index = p.index + i * width + static_cast<u64>(k);
      const u32 random = rules::random_bits(static_cast<u32>(index), index >> 32 == keys.high ? keys.here : keys.next);
      first[k] = random & 0xffffu;
      second[k] = random >> 16;
    }
  }
  put_weight<weight, width>(p, i, w);
  if constexpr (Rule::arrays > 0) put_state<state, width>(p.state[0], i, a, first);
  if constexpr (Rule::arrays > 1) put_state<state, width>(p.state[1], i, b, second);
}

template <DType weight, DType state>
__device__ bool all_aligned(const Piece& p, DType grad_dtype) {
  const auto loose = [](const void* data, std::size_t size) {
    return (reinterpret_cast<std::uintptr_t>(data) & (kWidth * size - 1)) != 0;
  };
  constexpr std::size_t item = state == DType::float32 ? 4 : 2;
  return !(loose(p.weight, weight == DType::float32 ? 4 : 2) || loose(p.master, 4) || loose(p.lo, 2) ||
           loose(p.state[0], item) || loose(p.state[1], item) || loose(p.grad, grad_dtype == DType::float32 ? 4 : 2));
}

/// The piece by this block's threads.
template <class Rule, DType weight, DType state>
__device__ void step_piece(const Piece& p, DType grad_dtype, const typename Rule::Factors& f) {
  Keys keys{};
  if constexpr (state == DType::bfloat16) keys = keys_of(f, p.index);
  std::size_t packs = 0;
  if (all_aligned<weight, state>(p, grad_dtype)) {
    packs = p.count / kWidth;
    for (std::size_t i = threadIdx.x; i < packs; i += kThreads)
      step_pack<Rule, weight, state, kWidth>(p, grad_dtype, f, keys, i);
  }
  for (std::size_t i = packs * kWidth + threadIdx.x; i < p.count; i += kThreads)
    step_pack<Rule, weight, state, 1>(p, grad_dtype, f, keys, i);
}

}  // namespace
}  // namespace zcomm::optim::cuda
