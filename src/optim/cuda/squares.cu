// Sums of squares of blocks of 64 on the device, in the order of add_squares: 16 lanes take a block, lane j its
// elements j, j + 16, j + 32, j + 48; then lanes are added by shuffles, 8, 4, 2 and 1 apart.
//
// 2 or 4 bytes read per element, 1/8 byte written. A warp's load is two runs of 16 elements (32 or 64 bytes, whole
// sectors), four of them in flight a lane. f64 multiplies and adds, 2 an element, keep up with memory on GPUs with f64
// at half or a quarter of f32's rate (data-centre GPUs); on others they are the limit. norm_kernel adds the sums to an
// ExactSum as ExactSum::add does: each block of threads to one in shared memory, then its words to the words of the
// whole sum. Integers, so in any order: the words' sum is the same.
#include <cstring>

#include "device/cuda/convert.cuh"
#include "device/cuda/launch.cuh"
#include "optim/cuda/kernels.hpp"

namespace zcomm::optim::cuda {
namespace {

constexpr unsigned kLanes = 16;  // of a block
constexpr std::size_t kBlocksAtOnce = device::cuda::kThreads / kLanes;

struct SquaresLaunch {
  double* sums;
  const void* grad;
  std::size_t count;
};

struct NormLaunch {
  unsigned long long* words;
  const void* grad;
  std::size_t count;
};

__device__ inline double square(float x) { return static_cast<double>(x) * static_cast<double>(x); }  // exact

template <DType dtype>
__device__ inline float load(const void* grad, std::size_t i) {
  if constexpr (dtype == DType::float32) return static_cast<const float*>(grad)[i];
  const std::uint16_t x = static_cast<const std::uint16_t*>(grad)[i];
  return dtype == DType::bfloat16 ? device::cuda::from_bf16(x) : device::cuda::from_f16(x);
}

/// Calls put(block, sum) in one lane of each block.
template <DType dtype, class Put>
__device__ inline void each_block(const void* grad, std::size_t count, const Put& put) {
  const unsigned lane = threadIdx.x % kLanes, mine = threadIdx.x / kLanes;
  const std::size_t blocks = (count + kNormBlock - 1) / kNormBlock;
  // Both halves of a warp run the loop equally often, because they meet in the shuffles.
  for (std::size_t from = blockIdx.x * kBlocksAtOnce; from < blocks; from += gridDim.x * kBlocksAtOnce) {
    const std::size_t block = from + mine, begin = block * kNormBlock + lane;
    float x[4];
    for (unsigned k = 0; k < 4; ++k) {
      const std::size_t i = begin + k * kLanes;
      x[k] = i < count ? load<dtype>(grad, i) : 0.0f;  // zeros add nothing
    }
    double sum = square(x[0]);
    for (int k = 1; k < 4; ++k) sum += square(x[k]);
    for (unsigned width = kLanes / 2; width > 0; width /= 2)
      sum += __shfl_down_sync(0xffffffffu, sum, width, static_cast<int>(kLanes));
    if (lane == 0 && block < blocks) put(block, sum);
  }
}

template <DType dtype>
__global__ void __launch_bounds__(device::cuda::kThreads) squares_kernel(const SquaresLaunch args) {
  each_block<dtype>(args.grad, args.count, [&args](std::size_t block, double sum) { args.sums[block] = sum; });
}

/// ExactSum::add of a sum of squares, which has no sign, without carries.
__device__ inline void add_term(unsigned long long* words, double term) {
  std::uint64_t bits;
  memcpy(&bits, &term, sizeof(bits));
  const unsigned exponent = static_cast<unsigned>(bits >> 52 & 0x7ff);
  if (exponent == 0x7ff) {
    atomicAdd(words + ExactSum::kWords - 1, 1ull);
    return;
  }
  const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
  const std::uint64_t mantissa = exponent == 0 ? fraction : fraction | std::uint64_t{1} << 52;
  const unsigned position = exponent == 0 ? 0 : exponent - 1, shift = position % 32;
  const std::uint64_t low = mantissa << shift, high = shift == 0 ? 0 : mantissa >> (64 - shift);
  unsigned long long* word = words + position / 32;
  atomicAdd(word, static_cast<unsigned long long>(low & 0xffffffff));
  atomicAdd(word + 1, static_cast<unsigned long long>(low >> 32));
  if (high != 0) atomicAdd(word + 2, static_cast<unsigned long long>(high));
}

template <DType dtype>
__global__ void __launch_bounds__(device::cuda::kThreads) norm_kernel(const NormLaunch args) {
  // A row for each warp, because no instruction adds 64 bits in shared memory, and threads that share a row spin.
  constexpr std::size_t kRows = device::cuda::kThreads / 32, kAll = kRows * ExactSum::kWords;
  __shared__ unsigned long long words[kAll];
  for (std::size_t i = threadIdx.x; i < kAll; i += device::cuda::kThreads) words[i] = 0;
  __syncthreads();
  unsigned long long* ours = words + threadIdx.x / 32 * ExactSum::kWords;
  each_block<dtype>(args.grad, args.count, [ours](std::size_t, double sum) { add_term(ours, sum); });
  __syncthreads();
  for (std::size_t i = threadIdx.x; i < ExactSum::kWords; i += device::cuda::kThreads) {
    unsigned long long sum = 0;  // as args.words: modulo 2^64, in any order
    for (std::size_t row = 0; row < kRows; ++row) sum += words[row * ExactSum::kWords + i];
    if (sum != 0) atomicAdd(args.words + i, sum);
  }
}

/// Launches the kernel's instance for the dtype on a stream, with as many blocks as there are sums for.
template <class Args>
void launch_each(void (*f32)(Args), void (*bf16)(Args), void (*f16)(Args), DType dtype, const Args& args,
                 std::uintptr_t native) {
  const auto kernel = dtype == DType::bfloat16 ? bf16 : dtype == DType::float16 ? f16 : f32;
  const unsigned blocks = device::cuda::blocks_for((args.count + kNormBlock - 1) / kNormBlock * kLanes);
  device::cuda::launch(kernel, blocks, reinterpret_cast<cudaStream_t>(native), args);
}

}  // namespace

void launch_squares(double* sums, const void* grad, DType dtype, std::size_t count, std::uintptr_t native) {
  launch_each<SquaresLaunch>(squares_kernel<DType::float32>, squares_kernel<DType::bfloat16>,
                             squares_kernel<DType::float16>, dtype, {sums, grad, count}, native);
}

void launch_norm(std::int64_t* words, const void* grad, DType dtype, std::size_t count, std::uintptr_t native) {
  launch_each<NormLaunch>(norm_kernel<DType::float32>, norm_kernel<DType::bfloat16>, norm_kernel<DType::float16>, dtype,
                          {reinterpret_cast<unsigned long long*>(words), grad, count}, native);
}

}  // namespace zcomm::optim::cuda
