// A launch of a CUDA kernel as loops over blocks and threads of the host; see cuda_runtime.h beside it.
//
// Threads run one after the other, each to its end, on a fiber that they share. One that waits for others (a shuffle,
// __syncwarp, __syncthreads) leaves its fiber standing; the rest go on with another. Every second launch goes backwards
// through blocks and threads, so that a kernel that depends on their order shows. Lanes that wait for one that has
// returned, or stands elsewhere, would hang a GPU: here it ends the program with a message.
// Thread rule: launches of different host threads are apart from each other.
#pragma once

#include <cstdint>
#include <functional>

namespace zcomm::emulation {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

void run_grid(Index grid, Index block, const std::function<void()>& thread);

/// Waits for all lanes of the warp in `mask`; returns what each of the 32 has given (0: not in the mask).
const std::uint64_t* exchange(std::uint32_t mask, std::uint64_t value);
/// Waits for all threads of the block.
void meet_block();

}  // namespace zcomm::emulation

// CUDA's own names, of the emulated thread that runs now.
constinit inline thread_local zcomm::emulation::Index threadIdx, blockIdx, blockDim, gridDim;
