// Launchers of the CUDA element kernels; arguments are checked by the caller (device.cu). Asynchronous on `stream`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "zcomm/dtype.hpp"

namespace zcomm::device::cuda {

inline constexpr std::size_t kMaxBuffers = 32;

/// Reduce passed by value as a kernel argument: see device/kernels.hpp.
struct ReduceLaunch {
  void* dst[kMaxBuffers];
  const void* src[kMaxBuffers];
  int dst_count, src_count;
  std::size_t count;
  DType in, out;
  ReduceOp op;
  bool accumulate;
  int remote;
};

void launch_reduce(const ReduceLaunch& args, cudaStream_t stream);
void launch_cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count, cudaStream_t stream);

}  // namespace zcomm::device::cuda
