// CUDA apart from its devices (device/device.hpp): availability, page locking, the calling thread's current device.
//
// The *.cu implement it with the CUDA runtime; no_cuda.cpp throws Unsupported (and available() == false). A build with
// CUDA still works on a machine without a driver: available() is then false.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "zcomm/error.hpp"

namespace zcomm::device::cuda {

bool available();    ///< built in, with a driver and a device
int device_count();  ///< 0 if not available
/// In hex, of each device that this process sees; processes may see different ones, under different indices.
std::vector<std::string> uuids();
std::string build_info();  ///< "CUDA 13.0" or "built without CUDA"

struct PageLockRefused : CudaError {
  using CudaError::CudaError;
};

/// Page-locks host memory for DMA; no-op with false if not available. Throws PageLockRefused, or CudaError if the
/// device is lost.
bool page_lock(void* data, std::size_t nbytes);
void page_unlock(void* data) noexcept;

/// Makes `device` the calling thread's for a scope. Throws CudaError, InvalidArgument for an unknown index.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
};

}  // namespace zcomm::device::cuda
