// Sums of squares of blocks of 64 on the device, in the order of add_squares: 16 lanes take a block, lane j its
// elements j, j + 16, j + 32, j + 48; then lanes are added by shuffles, 8, 4, 2 and 1 apart.
//
// 2 or 4 bytes read per element, 1/8 byte written. A warp's load is two runs of 16 elements (32 or 64 bytes, whole
// sectors), four of them in flight a lane. f64 multiplies and adds, 2 an element, keep up with memory where f64 runs
// at half or a quarter of f32's rate (data-centre GPUs); elsewhere they set the pace.
#include "device/cuda_convert.cuh"
#include "device/cuda_launch.cuh"
#include "optim/cuda_optim.hpp"

namespace zcomm::optim::cuda {
namespace {

constexpr unsigned kLanes = 16;  // of a block
constexpr std::size_t kBlocksAtOnce = device::cuda::kThreads / kLanes;

struct SquaresLaunch {
  double* sums;
  const void* grad;
  std::size_t count;
};

__device__ inline double square(float x) { return static_cast<double>(x) * static_cast<double>(x); }  // exact

template <DType dtype>
__device__ inline float load(const void* grad, std::size_t i) {
  if constexpr (dtype == DType::f32) return static_cast<const float*>(grad)[i];
  const std::uint16_t x = static_cast<const std::uint16_t*>(grad)[i];
  return dtype == DType::bf16 ? device::cuda::from_bf16(x) : device::cuda::from_f16(x);
}

template <DType dtype>
__global__ void __launch_bounds__(device::cuda::kThreads) squares_kernel(const SquaresLaunch args) {
  const unsigned lane = threadIdx.x % kLanes, mine = threadIdx.x / kLanes;
  const std::size_t blocks = (args.count + kNormBlock - 1) / kNormBlock;
  // Both halves of a warp go through the loop as often: they meet in the shuffles.
  for (std::size_t from = blockIdx.x * kBlocksAtOnce; from < blocks; from += gridDim.x * kBlocksAtOnce) {
    const std::size_t block = from + mine, begin = block * kNormBlock + lane;
    float x[4];
    for (unsigned k = 0; k < 4; ++k) {
      const std::size_t i = begin + k * kLanes;
      x[k] = i < args.count ? load<dtype>(args.grad, i) : 0.0f;  // zeros add nothing
    }
    double sum = square(x[0]);
    for (int k = 1; k < 4; ++k) sum += square(x[k]);
    for (unsigned width = kLanes / 2; width > 0; width /= 2)
      sum += __shfl_down_sync(0xffffffffu, sum, width, static_cast<int>(kLanes));
    if (lane == 0 && block < blocks) args.sums[block] = sum;
  }
}

}  // namespace

void launch_squares(double* sums, const void* grad, DType dtype, std::size_t count, std::uintptr_t native) {
  const auto stream = reinterpret_cast<cudaStream_t>(native);
  const SquaresLaunch args{sums, grad, count};
  const unsigned blocks = device::cuda::blocks_for((count + kNormBlock - 1) / kNormBlock * kLanes);
  switch (dtype) {
    case DType::bf16:
      return device::cuda::launch(squares_kernel<DType::bf16>, blocks, stream, args);
    case DType::f16:
      return device::cuda::launch(squares_kernel<DType::f16>, blocks, stream, args);
    default:
      return device::cuda::launch(squares_kernel<DType::f32>, blocks, stream, args);
  }
}

}  // namespace zcomm::optim::cuda
