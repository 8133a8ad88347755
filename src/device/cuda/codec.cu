// encode and decode_sum on the device, with the bits of device/cpu/codec_body.hpp: a warp takes a block of 256
// elements.
//
// Memory-bound: each byte is read and written once. A block's elements wait in registers, 8 a lane, until the warp has
// found the largest (one reduction of integers) and with it their scale. A rotation is five shuffles of each register.
#include "device/cuda/codec_blocks.cuh"
#include "device/cuda/tasks.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "zcomm's kernels need compute capability 8.0 (Ampere) or later: see CMAKE_CUDA_ARCHITECTURES"
#endif

namespace zcomm::device::cuda {
namespace {

constexpr u32 kHalfBlock = kCodecBlock / 2;

/// See [Note: rotation] in zcomm/codec.hpp
__device__ inline void turn_block(float* x, u32 lane) {
  for (u32 width = 1; width < kCodecWarp; width *= 2)
    for (int r = 0; r < kPerCodecLane; ++r) {
      const float other = __shfl_xor_sync(kCodecLanes, x[r], static_cast<int>(width));
      x[r] = (lane & width) != 0 ? other - x[r] : x[r] + other;
    }
}

/// Elements that have codes: a rotation fills up 32.
__device__ inline u32 coded_count(u32 n, bool rotate) { return rotate ? (n + 31u) / 32u * 32u : n; }

template <class Code>
__device__ void encode_block(const EncodePart& p, std::size_t block) {
  const LaneElements e = lane_elements(block, p.count);
  float x[kPerCodecLane], error[kPerCodecLane], coded[kPerCodecLane];
  read_block(p, e, x, error);
  for (int r = 0; r < kPerCodecLane; ++r) coded[r] = x[r];
  if (p.rotate) turn_block(coded, e.lane);
  const u16 scale = rules::block_scale(largest_of_block(coded), Code::kTop);
  const bool finite = scale != rules::kLostScale;
  const float divisor = rules::from_bf16(scale);
  const rules::RoundingKey key = rules::rounding_key(p.seed, p.first_block + block);
  u32 codes[kPerCodecLane];
  for (int r = 0; r < kPerCodecLane; ++r) {
    const float quotient = coded[r] / divisor;
    const u32 code = p.stochastic ? Code::by_chance(quotient, coded[r], rules::random_bits(e.place(r), key))
                                  : Code::nearest(quotient, coded[r]);
    codes[r] = finite ? code & 0xffu : 0u;
  }
  const u32 n = coded_count(e.n, p.rotate);
  if constexpr (Code::kPacked) {
    std::uint8_t* const bytes = p.out.codes + block * kHalfBlock;
    for (int r = 0; r < kPerCodecLane / 2; ++r)  // the code of an element beyond the end is 0
      if (e.place(r) < n)
        bytes[e.place(r)] = static_cast<std::uint8_t>((codes[r] & 15u) | (codes[r + kPerCodecLane / 2] & 15u) << 4);
  } else {
    for (int r = 0; r < kPerCodecLane; ++r)
      if (e.place(r) < n) p.out.codes[e.index(r)] = static_cast<std::uint8_t>(codes[r]);
  }
  if (e.lane == 0) p.out.scales[block] = scale;
  if (e.begin + kCodecBlock >= p.count) {
    clear_bytes(p.out.scales, (block + 1) * sizeof(u16), p.out.scales_nbytes, e.lane);
    clear_bytes(p.out.codes, p.codes_written, p.out.codes_nbytes, e.lane);
  }
  const float factor = p.rotate ? divisor * 0x1p-5f : divisor;
  for (int r = 0; r < kPerCodecLane; ++r) coded[r] = Code::value(codes[r]) * factor;
  if (p.rotate) turn_block(coded, e.lane);
  finish_block(p, e, x, coded, error, finite);
}

template <class Code>
__global__ void __launch_bounds__(kThreads) encode_kernel(const EncodePart p) {
  const std::size_t blocks = (p.count + kCodecBlock - 1) / kCodecBlock;
  for (std::size_t b = first_item() / kCodecWarp; b < blocks; b += item_stride() / kCodecWarp) encode_block<Code>(p, b);
}

template <class Code>
__device__ void decode_block(const DecodePart& p, std::size_t block) {
  const LaneElements e = lane_elements(block, p.count);
  const u32 n = coded_count(e.n, p.rotate);
  float sum[kPerCodecLane] = {};
  for (int s = 0; s < p.in_count; ++s) {
    const float scale = rules::from_bf16(reinterpret_cast<const u16*>(p.in[s])[block]);
    const float factor = p.rotate ? scale * 0x1p-5f : scale;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(p.in[s] + p.scales_nbytes);
    float value[kPerCodecLane];
    for (int r = 0; r < kPerCodecLane; ++r) {
      u32 code = 0;
      if (e.place(r) < n) {
        if constexpr (Code::kPacked) {
          const u32 byte = codes[block * kHalfBlock + e.place(r) % kHalfBlock];
          code = e.place(r) < kHalfBlock ? byte : byte >> 4;
        } else {
          code = codes[e.index(r)];
        }
      }
      value[r] = Code::value(code) * factor;
    }
    if (p.rotate) turn_block(value, e.lane);
    for (int r = 0; r < kPerCodecLane; ++r) sum[r] = s == 0 ? value[r] : sum[r] + value[r];
  }
  put_sum(p, e, sum);
}

template <class Code>
__global__ void __launch_bounds__(kThreads) decode_kernel(const DecodePart p) {
  const std::size_t blocks = (p.count + kCodecBlock - 1) / kCodecBlock;
  for (std::size_t b = first_item() / kCodecWarp; b < blocks; b += item_stride() / kCodecWarp) decode_block<Code>(p, b);
}

template <class Code>
void launch_encode_blocks(const EncodePart& part, cudaStream_t stream) {
  launch(encode_kernel<Code>, codec_grid(part.count), stream, part);
}

template <class Code>
void launch_decode_blocks(const DecodePart& part, cudaStream_t stream) {
  launch(decode_kernel<Code>, codec_grid(part.count), stream, part);
}

EncodePart part_of(const Codec& codec, const Encode& args) {
  EncodePart part{};
  part.out = encoded_at(args.out, codec, args.count);
  part.codes_written = written_codes(codec, args.count);
  part.in = args.in;
  part.error = args.error;
  if (args.error != nullptr && args.error_dtype == DType::int8) {
    const Encoded error = encoded_at(static_cast<std::byte*>(args.error), kInt8Codec, args.count);
    part.error = error.codes;
    part.error_scales = error.scales;
  }
  part.base = args.base;
  part.mask = args.mask;
  part.count = args.count;
  part.seed = args.seed;
  part.first_block = args.first_index / kCodecBlock;
  part.keep = args.keep;
  part.in_dtype = args.dtype;
  part.error_dtype = args.error_dtype;
  part.base_dtype = args.base_dtype;
  part.rotate = codec.rotate != 0;
  part.stochastic = codec.stochastic;
  return part;
}

DecodePart part_of(const Codec& codec, const Decode& args) {
  DecodePart part{};
  for (std::size_t s = 0; s < args.in.size(); ++s) part.in[s] = args.in[s];
  part.in_count = static_cast<int>(args.in.size());
  part.scales_nbytes = encoded_layout(codec, args.count).scales_nbytes;
  part.out = args.out;
  part.mask = args.mask;
  part.count = args.count;
  part.divide_by = args.divide_by;
  part.out_dtype = args.dtype;
  part.accumulate = args.accumulate;
  part.rotate = codec.rotate != 0;
  return part;
}

}  // namespace

void launch_encode(const Codec& codec, const Encode& args, std::uintptr_t native) {
  const auto stream = reinterpret_cast<cudaStream_t>(native);
  const EncodePart part = part_of(codec, args);
  switch (codec.kind) {
    case CodecKind::block_int:
      return codec.bits == 4 ? launch_encode_blocks<rules::Int4Code>(part, stream)
                             : launch_encode_blocks<rules::Int8Code>(part, stream);
    case CodecKind::fp8_e4m3:
      return launch_encode_blocks<rules::Fp8Code>(part, stream);
    case CodecKind::sign:
      return launch_encode_signs(part, stream);
  }
}

void launch_decode_sum(const Codec& codec, const Decode& args, std::uintptr_t native) {
  const auto stream = reinterpret_cast<cudaStream_t>(native);
  const DecodePart part = part_of(codec, args);
  switch (codec.kind) {
    case CodecKind::block_int:
      return codec.bits == 4 ? launch_decode_blocks<rules::Int4Code>(part, stream)
                             : launch_decode_blocks<rules::Int8Code>(part, stream);
    case CodecKind::fp8_e4m3:
      return launch_decode_blocks<rules::Fp8Code>(part, stream);
    case CodecKind::sign:
      return launch_decode_signs(part, stream);
  }
}

}  // namespace zcomm::device::cuda
