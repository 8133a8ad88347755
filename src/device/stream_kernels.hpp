// StreamKernels: the element kernels of a device, put on a stream. The bits are those of the CPU's (decision D3).
//
// Pointers are to memory that the device reads and writes; arguments are checked and copied before a call returns.
// Thread rule: as the Stream's. Errors: InvalidArgument at once; CudaError as in device.hpp.
#pragma once

#include <cstddef>

#include "device/kernels.hpp"

namespace zcomm::device {

inline constexpr std::size_t kMaxKernelBuffers = 8;  ///< dst and src each, of one reduce

class StreamKernels {
 public:
  virtual ~StreamKernels() = default;
  virtual void reduce(const Reduce& args) = 0;  ///< as device::reduce
  virtual void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) = 0;
};

}  // namespace zcomm::device
