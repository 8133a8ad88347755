// Machine: element kernels to compare with the host's: the emulation, a simulated device, a GPU.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/stream_kernels.hpp"

namespace zcomm::test {

class Machine {
 public:
  virtual ~Machine() = default;
  virtual std::string name() const = 0;
  /// Memory that the machine and the host address, 256-byte aligned and at least so long; the same from call to call.
  virtual std::byte* memory(std::size_t nbytes) = 0;
  virtual void reduce(const device::Reduce& args) = 0;
  virtual void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) = 0;
  virtual void scale(const device::Scale& args) = 0;
  virtual void copy_list(const device::CopyList& list) = 0;
  virtual void checksum(const device::Checksum& args) = 0;
  virtual void encode(const Codec& codec, const device::Encode& args) = 0;
  virtual void decode_sum(const Codec& codec, const device::Decode& args) = 0;
  virtual void synchronize() {}
};

/// Those that this program can run on, the emulation first.
std::vector<std::unique_ptr<Machine>> machines();

}  // namespace zcomm::test
