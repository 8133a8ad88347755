// A launch of a CUDA kernel as loops over blocks and threads of the host; see cuda_runtime.h in this folder.
//
// Threads run one after the other, each to its end, on a shared fiber. A thread that waits for others (a shuffle,
// __syncwarp, __syncthreads) suspends its fiber, and the others continue on another one. Every second launch runs
// backwards through blocks and threads, to reveal kernels that depend on their order. Lanes that wait for one that has
// returned, or waits at another point, would hang a GPU; here the program ends with a message. Thread rule: launches of
// different host threads are independent.
#pragma once

#include <cstdint>
#include <functional>

namespace zcomm::emulation {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

void run_grid(Index grid, Index block, const std::function<void()>& thread);

/// Waits for all lanes of the warp in `mask`; returns the value of each of the 32 (0: not in the mask).
const std::uint64_t* exchange(std::uint32_t mask, std::uint64_t value);
/// Waits for all threads of the block.
void meet_block();

}  // namespace zcomm::emulation

// CUDA's own names, of the emulated thread that runs now.
constinit inline thread_local zcomm::emulation::Index threadIdx, blockIdx, blockDim, gridDim;
