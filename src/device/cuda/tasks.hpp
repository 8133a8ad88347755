// CUDA's side of the tasks in device/stream_kernels.cpp; no CUDA types, so that a build without CUDA has a twin
// (no_cuda_kernels.cpp). Arguments are checked; asynchronous on `stream`, a cudaStream_t of the current device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/checksum.hpp"
#include "device/codec.hpp"
#include "device/copy_list.hpp"
#include "device/scale.hpp"

namespace zcomm::device::cuda {

void launch_scale(const Scale& args, std::uintptr_t stream);
void launch_checksum(const Checksum& args, std::uintptr_t stream);
void launch_encode(const Codec& codec, const Encode& args, std::uintptr_t stream);
void launch_decode_sum(const Codec& codec, const Decode& args, std::uintptr_t stream);

/// items: in device memory; chunks: of all of them.
struct CopyLaunch {
  const CopyItem* items;
  std::size_t count;
  std::uint64_t chunks;
  DType dst_dtype, src_dtype;
};
void launch_copy_list(const CopyLaunch& args, std::uintptr_t stream);

}  // namespace zcomm::device::cuda
