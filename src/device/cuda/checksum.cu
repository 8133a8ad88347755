// checksum on the device, with the bits of device/checksum.cpp: integers, so in any order.
//
// Memory-bound: loads of 8 bytes if the data begins at a multiple of 8, and some ten integer instructions. Other data
// is read byte by byte, with 32 lanes sharing each line.
#include "device/checksum.hpp"
#include "device/cuda/launch.cuh"
#include "device/cuda/tasks.hpp"

namespace zcomm::device::cuda {
namespace {

struct ChecksumLaunch {
  unsigned long long* sum;
  const std::uint8_t* data;
  std::size_t nbytes;
};

template <bool aligned>
__device__ inline std::uint64_t load_word(const std::uint8_t* data, std::size_t i) {
  if constexpr (aligned) return reinterpret_cast<const std::uint64_t*>(data)[i];
  std::uint64_t word = 0;
  for (unsigned k = 0; k < 8; ++k) word |= std::uint64_t{data[8 * i + k]} << 8 * k;
  return word;
}

template <bool aligned>
__global__ void __launch_bounds__(kThreads) checksum_kernel(const ChecksumLaunch args) {
  const std::size_t words = args.nbytes / 8;
  std::uint64_t sum = 0;
  for (std::size_t i = first_item(); i < words; i += item_stride())
    sum += checksum_term(load_word<aligned>(args.data, i), i);
  if (first_item() == 0 && args.nbytes % 8 != 0) {
    std::uint64_t word = 0;
    for (std::size_t k = 0; k < args.nbytes % 8; ++k) word |= std::uint64_t{args.data[8 * words + k]} << 8 * k;
    sum += checksum_term(word, words);
  }
  for (unsigned width = 16; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width);
  if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(args.sum, static_cast<unsigned long long>(sum));
}

}  // namespace

void launch_checksum(const Checksum& args, std::uintptr_t native) {
  const ChecksumLaunch work{reinterpret_cast<unsigned long long*>(args.sum),
                            static_cast<const std::uint8_t*>(args.data), args.nbytes};
  launch(aligned_to(args.data, 8) ? checksum_kernel<true> : checksum_kernel<false>, blocks_for((args.nbytes + 7) / 8),
         reinterpret_cast<cudaStream_t>(native), work);
}

}  // namespace zcomm::device::cuda
