// StreamKernels: the element kernels of a device, run on a stream, with the CPU's bits (decision D3).
//
// Pointers are to memory that the device reads and writes; arguments are checked and copied before a call returns. No
// call allocates on the device or waits for it, so a CUDA graph can capture each. Thread rule: as the Stream's. Errors:
// InvalidArgument at once; CudaError as in device.hpp.
#pragma once

#include <cstddef>

#include "device/checksum.hpp"
#include "device/codec.hpp"
#include "device/copy_list.hpp"
#include "device/kernel_task.hpp"
#include "device/kernels.hpp"
#include "device/scale.hpp"

namespace zcomm::device {

inline constexpr std::size_t kMaxKernelBuffers = 32;  ///< dst and src each, of one reduce; inputs of a decode_sum

class StreamKernels {
 public:
  virtual ~StreamKernels() = default;
  virtual void reduce(const Reduce& args) = 0;  ///< as device::reduce
  virtual void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) = 0;
  virtual void run(const KernelTask& task) = 0;

  void scale(const Scale& args);         ///< as device::scale; `more` and `nonfinite` are device memory
  void copy_list(const CopyList& list);  ///< pack and unpack
  void checksum(const Checksum& args);   ///< as device::checksum; `sum` is device memory

  /// As device::encode and device::decode_sum; masks are device memory, too. At most kMaxKernelBuffers inputs.
  void encode(const Codec& codec, const Encode& args);
  void decode_sum(const Codec& codec, const Decode& args);
};

}  // namespace zcomm::device
