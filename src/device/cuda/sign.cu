// sign on the device, with the bits of device/cpu/sign_body.hpp: squares of each block, their sum and the part's scale,
// then the signs. The elements are read twice, because the scale must be known before the first error is.
#include "device/cuda/codec_blocks.cuh"

namespace zcomm::device::cuda {
namespace {

using rules::BlockSquares;
using rules::kSignBytes;
using rules::kTotalLanes;
static_assert(rules::kSquareLanes == kCodecWarp && kTotalLanes == kThreads);

__device__ inline bool is_kept(const std::uint8_t* mask, std::size_t i) {
  return mask == nullptr || (mask[i / 8] >> (i % 8) & 1u) != 0;
}

/// As read_block; masked elements are 0. Returns the lane's count of elements that the mask keeps.
__device__ inline u32 read_masked(const EncodePart& p, const LaneElements& e, float* x, float* error) {
  read_block(p, e, x, error);
  u32 kept = 0;
  for (int r = 0; r < kPerCodecLane; ++r) {
    if (!e.has(r)) continue;
    const bool keep = is_kept(p.mask, e.index(r));
    kept += keep ? 1u : 0u;
    x[r] = keep ? x[r] : 0.0f;
  }
  return kept;
}

__global__ void __launch_bounds__(kThreads) square_kernel(const EncodePart p) {
  const std::size_t blocks = (p.count + kCodecBlock - 1) / kCodecBlock;
  for (std::size_t b = first_item() / kCodecWarp; b < blocks; b += item_stride() / kCodecWarp) {
    const LaneElements e = lane_elements(b, p.count);
    float x[kPerCodecLane], error[kPerCodecLane];
    u32 kept = read_masked(p, e, x, error);
    double sum = 0.0;
    for (int r = 0; r < kPerCodecLane; ++r) {
      if (!e.has(r)) continue;
      const auto value = static_cast<double>(x[r]);
      sum += value * value;
    }
    for (unsigned width = kCodecWarp / 2; width > 0; width /= 2) {
      sum += __shfl_down_sync(kCodecLanes, sum, width);
      kept += __shfl_down_sync(kCodecLanes, kept, width);
    }
    if (e.lane == 0) *reinterpret_cast<BlockSquares*>(p.out.codes + b * kSignBytes) = {sum, kept};
  }
}

/// One block of threads.
__global__ void __launch_bounds__(kThreads) sign_scale_kernel(const EncodePart p) {
  __shared__ double sums[kThreads];
  __shared__ u64 counts[kThreads];
  const std::size_t blocks = (p.count + kCodecBlock - 1) / kCodecBlock;
  double sum = 0.0;
  u64 count = 0;
  for (std::size_t b = threadIdx.x; b < blocks; b += kThreads) {
    const auto block = *reinterpret_cast<const BlockSquares*>(p.out.codes + b * kSignBytes);
    sum += block.sum;
    count += block.count;
  }
  sums[threadIdx.x] = sum;
  counts[threadIdx.x] = count;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      sums[threadIdx.x] += sums[threadIdx.x + half];
      counts[threadIdx.x] += counts[threadIdx.x + half];
    }
  }
  if (threadIdx.x < kCodecWarp) clear_bytes(p.out.scales, sizeof(u16), p.out.scales_nbytes, threadIdx.x);
  if (threadIdx.x == 0) p.out.scales[0] = rules::sign_scale(sums[0], counts[0]);
}

__global__ void __launch_bounds__(kThreads) sign_kernel(const EncodePart p) {
  const std::size_t blocks = (p.count + kCodecBlock - 1) / kCodecBlock;
  const u16 bits = p.out.scales[0];
  const bool finite = bits != rules::kLostScale;
  const float scale = rules::from_bf16(bits);
  for (std::size_t b = first_item() / kCodecWarp; b < blocks; b += item_stride() / kCodecWarp) {
    const LaneElements e = lane_elements(b, p.count);
    float x[kPerCodecLane], error[kPerCodecLane], decoded[kPerCodecLane];
    read_masked(p, e, x, error);
    const std::size_t first = b * kSignBytes;
    for (int r = 0; r < kPerCodecLane; ++r) {
      const u32 word = __ballot_sync(kCodecLanes, finite && e.has(r) && x[r] < 0.0f);
      decoded[r] = e.has(r) && is_kept(p.mask, e.index(r)) ? (x[r] < 0.0f ? -scale : scale) : 0.0f;
      const std::size_t at = first + static_cast<std::size_t>(r) * sizeof(word);
      if (e.lane < sizeof(word) && at + e.lane < p.codes_written)
        p.out.codes[at + e.lane] = static_cast<std::uint8_t>(word >> 8 * e.lane);
    }
    if (e.begin + kCodecBlock >= p.count) clear_bytes(p.out.codes, p.codes_written, p.out.codes_nbytes, e.lane);
    finish_block(p, e, x, decoded, error, finite);
  }
}

__global__ void __launch_bounds__(kThreads) sign_sum_kernel(const DecodePart p) {
  const std::size_t blocks = (p.count + kCodecBlock - 1) / kCodecBlock;
  for (std::size_t b = first_item() / kCodecWarp; b < blocks; b += item_stride() / kCodecWarp) {
    const LaneElements e = lane_elements(b, p.count);
    float sum[kPerCodecLane] = {};
    for (int s = 0; s < p.in_count; ++s) {
      const float scale = rules::from_bf16(*reinterpret_cast<const u16*>(p.in[s]));
      const auto* codes = reinterpret_cast<const std::uint8_t*>(p.in[s] + p.scales_nbytes);
      for (int r = 0; r < kPerCodecLane; ++r) {
        if (!e.has(r)) continue;
        const std::size_t i = e.index(r);
        const bool negative = (codes[i / 8] >> (i % 8) & 1u) != 0;
        const float value = !is_kept(p.mask, i) ? 0.0f : negative ? -scale : scale;
        sum[r] = s == 0 ? value : sum[r] + value;
      }
    }
    put_sum(p, e, sum);
  }
}

}  // namespace

void launch_encode_signs(const EncodePart& part, cudaStream_t stream) {
  launch(square_kernel, codec_grid(part.count), stream, part);
  launch(sign_scale_kernel, 1, stream, part);
  launch(sign_kernel, codec_grid(part.count), stream, part);
}

void launch_decode_signs(const DecodePart& part, cudaStream_t stream) {
  launch(sign_sum_kernel, codec_grid(part.count), stream, part);
}

}  // namespace zcomm::device::cuda
