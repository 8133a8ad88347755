// A block of 256 elements in the registers of a warp, for codec.cu and sign.cu, with the bits of
// device/cpu/codec_blocks.hpp: register r of a lane has element r * 32 + lane, so that each load of a warp is adjacent,
// and a rotation's 32 elements are one register of all lanes.
#pragma once

#define ZC_INLINE __host__ __device__ __forceinline__
#define ZC_ISA gpu
#define ZC_ISA_LEVEL 0

#include "device/arithmetic/block_int.hpp"
#include "device/arithmetic/fp8.hpp"
#include "device/arithmetic/sign.hpp"
#include "device/codec.hpp"
#include "device/codec_layout.hpp"
#include "device/cuda/convert.cuh"
#include "device/cuda/launch.cuh"
#include "device/stream_kernels.hpp"

namespace zcomm::device::cuda {

/// Encode as a kernel takes it.
struct EncodePart {
  Encoded out;
  std::size_t codes_written;  // bytes; the rest are 0
  const void* in;
  void* error;
  u16* error_scales;
  void* base;
  const std::uint8_t* mask;
  std::size_t count;
  u64 seed, first_block;
  float keep;
  DType in_dtype, error_dtype, base_dtype;
  bool rotate, stochastic;
};

/// Decode as a kernel takes it.
struct DecodePart {
  const std::byte* in[kMaxKernelBuffers];
  int in_count;
  std::size_t scales_nbytes;
  void* out;
  const std::uint8_t* mask;
  std::size_t count;
  float divide_by;
  DType out_dtype;
  bool accumulate, rotate;
};

void launch_encode_signs(const EncodePart& part, cudaStream_t stream);
void launch_decode_signs(const DecodePart& part, cudaStream_t stream);

namespace {

namespace rules = zcomm::device::gpu;

constexpr unsigned kCodecWarp = 32, kCodecLanes = 0xffffffffu;
constexpr int kPerCodecLane = static_cast<int>(kCodecBlock / kCodecWarp);

inline std::size_t codec_blocks(std::size_t count) { return (count + kCodecBlock - 1) / kCodecBlock; }
/// A warp for each block, in strides of the grid.
inline unsigned codec_grid(std::size_t count) { return blocks_for(codec_blocks(count) * kCodecWarp); }

/// The elements of the calling lane.
struct LaneElements {
  std::size_t begin;  // of the block
  u32 n, lane;        // n: elements of the block
  __device__ u32 place(int r) const { return static_cast<u32>(r) * kCodecWarp + lane; }
  __device__ bool has(int r) const { return place(r) < n; }
  __device__ std::size_t index(int r) const { return begin + place(r); }
};

__device__ inline LaneElements lane_elements(std::size_t block, std::size_t count) {
  const std::size_t begin = block * kCodecBlock, left = count - begin;
  return {begin, static_cast<u32>(left < kCodecBlock ? left : kCodecBlock), threadIdx.x % kCodecWarp};
}

__device__ inline float load_float(const void* data, DType dtype, std::size_t i) {
  if (dtype == DType::float32) return static_cast<const float*>(data)[i];
  const u16 bits = static_cast<const u16*>(data)[i];
  return dtype == DType::bfloat16 ? from_bf16(bits) : from_f16(bits);
}

__device__ inline void store_float(void* data, DType dtype, std::size_t i, float x) {
  if (dtype == DType::float32) {
    static_cast<float*>(data)[i] = x;
  } else {
    static_cast<u16*>(data)[i] = dtype == DType::bfloat16 ? to_bf16(x) : to_f16(x);
  }
}

/// Bits of the block's largest magnitude; 0 for elements that it does not have.
__device__ inline u32 largest_of_block(const float* x) {
  u32 largest = 0;
  for (int r = 0; r < kPerCodecLane; ++r) {
    const u32 magnitude = rules::bits_of(x[r]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return __reduce_max_sync(kCodecLanes, largest);
}

/// The elements to encode, 0 beyond the block's end, and the error that they include.
__device__ inline void read_block(const EncodePart& p, const LaneElements& e, float* x, float* error) {
  const bool coded = p.error != nullptr && p.error_dtype == DType::int8;
  const float scale = coded ? rules::from_bf16(p.error_scales[e.begin / kCodecBlock]) : 0.0f;
  for (int r = 0; r < kPerCodecLane; ++r) {
    x[r] = error[r] = 0.0f;
    if (!e.has(r)) continue;
    const std::size_t i = e.index(r);
    x[r] = load_float(p.in, p.in_dtype, i);
    if (p.base != nullptr) x[r] = x[r] - load_float(p.base, p.base_dtype, i);
    if (p.error == nullptr) continue;
    error[r] = coded ? rules::Int8Code::value(static_cast<const std::uint8_t*>(p.error)[i]) * scale
                     : load_float(p.error, p.error_dtype, i);
    x[r] = x[r] + error[r];
  }
}

/// error and base of a block. decoded: NaN everywhere if the block is not `finite`.
__device__ inline void finish_block(const EncodePart& p, const LaneElements& e, const float* x, const float* decoded,
                                    const float* error, bool finite) {
  if (p.error != nullptr) {
    float next[kPerCodecLane];
    for (int r = 0; r < kPerCodecLane; ++r) {
      const float residue = x[r] - decoded[r];
      next[r] = !e.has(r) || !finite ? 0.0f : p.keep == 0.0f ? residue : p.keep * error[r] + (1.0f - p.keep) * residue;
    }
    if (p.error_dtype == DType::int8) {
      const u16 scale = rules::block_scale(largest_of_block(next), rules::Int8Code::kTop);  // all have read the old one
      for (int r = 0; r < kPerCodecLane; ++r)
        if (e.has(r))
          static_cast<std::uint8_t*>(p.error)[e.index(r)] =
              static_cast<std::uint8_t>(rules::Int8Code::nearest(next[r] / rules::from_bf16(scale), next[r]));
      if (e.lane == 0) p.error_scales[e.begin / kCodecBlock] = scale;
    } else {
      for (int r = 0; r < kPerCodecLane; ++r)
        if (e.has(r)) store_float(p.error, p.error_dtype, e.index(r), next[r]);
    }
  }
  if (p.base == nullptr) return;
  for (int r = 0; r < kPerCodecLane; ++r)
    if (e.has(r))
      store_float(p.base, p.base_dtype, e.index(r), load_float(p.base, p.base_dtype, e.index(r)) + decoded[r]);
}

/// Zeros in bytes [begin, end), by the calling warp.
__device__ inline void clear_bytes(void* data, std::size_t begin, std::size_t end, u32 lane) {
  for (std::size_t i = begin + lane; i < end; i += kCodecWarp) static_cast<std::uint8_t*>(data)[i] = 0;
}

__device__ inline void put_sum(const DecodePart& p, const LaneElements& e, float* sum) {
  for (int r = 0; r < kPerCodecLane; ++r) {
    if (!e.has(r)) continue;
    if (p.divide_by != 1.0f) sum[r] = sum[r] / p.divide_by;
    if (p.accumulate) sum[r] = load_float(p.out, p.out_dtype, e.index(r)) + sum[r];
    store_float(p.out, p.out_dtype, e.index(r), sum[r]);
  }
}

}  // namespace

}  // namespace zcomm::device::cuda
