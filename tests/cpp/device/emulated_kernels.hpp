// The launchers of src/device/cuda/*.cu, over cuda_emulation instead of CUDA: on host memory, at once.
//
// Their namespace device::cuda is called device::emulated here, so that a program may hold the real ones, too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/kernels.hpp"
#include "device/stream_kernels.hpp"

#define cuda emulated
#include "device/cuda/tasks.hpp"
#undef cuda

namespace zcomm::device::emulated {

void reduce(const Reduce& args);
/// Blocks of this thread's last launch.
unsigned last_grid();
void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count);

}  // namespace zcomm::device::emulated
