// Launching kernels, and parts shared by their bodies. No <<<>>>: the tests also compile these sources for the host,
// with a loop as the launch (tests/cpp/cuda_emulation), so that every kernel is run without a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace zcomm::device::cuda {

// 8 blocks of 256 threads fill a multiprocessor at up to 32 registers a thread, 4 at up to 64. A grid of 1024 blocks is
// one wave on today's GPUs (108 to 148 multiprocessors): longer arrays are processed in strides of the grid, so that
// adjacent blocks access adjacent memory at any time.
constexpr unsigned kThreads = 256;
constexpr std::size_t kMaxBlocks = 1024;

inline unsigned blocks_for(std::size_t items) {
  const std::size_t blocks = (items + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

/// Asynchronous; arguments are passed by value. Errors are left for cudaGetLastError.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), unsigned blocks, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim.x = blocks;
  config.blockDim.x = kThreads;
  config.stream = stream;
  cudaLaunchKernelEx(&config, kernel, args...);
}

/// This thread's index in the grid, and the number of threads in the grid.
__device__ inline std::size_t first_item() { return static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline std::size_t item_stride() { return static_cast<std::size_t>(gridDim.x) * blockDim.x; }

/// `width` elements as one load or store.
template <class V, int width>
struct alignas(sizeof(V) * width) Pack {
  V at[width];
};

inline bool aligned_to(const void* data, std::size_t nbytes) {
  return reinterpret_cast<std::uintptr_t>(data) % nbytes == 0;
}

}  // namespace zcomm::device::cuda
