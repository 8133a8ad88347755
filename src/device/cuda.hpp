// The accelerator as the core sees it: streams, events, copies, page locking, element kernels.
//
// cuda.cu implements it with the CUDA runtime; no_cuda.cpp says Unsupported (and available() == false).
// A build with CUDA still works on a machine without a driver: available() is false there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/kernels.hpp"

namespace zcomm::device::cuda {

bool available();          ///< built in, and a driver and a device are there
int device_count();        ///< 0 when not available
std::string build_info();  ///< "CUDA 13.0" or "built without CUDA"

/// Page-locks host memory for DMA; no-op with false when not available. Throws CudaError.
bool page_lock(void* data, std::size_t nbytes);
void page_unlock(void* data) noexcept;

/// Makes `device` the calling thread's for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
};

/// Non-blocking stream; move-only.
class Stream {
 public:
  explicit Stream(int device);
  Stream(Stream&& other) noexcept;
  ~Stream();
  void synchronize();
  void copy(void* dst, const void* src, std::size_t nbytes);  ///< any direction, unified addressing
  /// As device::reduce on device memory; dst/src are device pointers, at most 8 of each.
  void reduce(const Reduce& args);
  void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count);
  std::uintptr_t handle() const { return handle_; }

 private:
  int device_ = 0;
  std::uintptr_t handle_ = 0;
};

/// Marks a point in a stream; move-only.
class Event {
 public:
  explicit Event(int device);
  Event(Event&& other) noexcept;
  ~Event();
  void record(Stream& stream);
  void wait(Stream& stream);  ///< stream waits for the recorded point
  bool done() const;

 private:
  std::uintptr_t handle_ = 0;
};

}  // namespace zcomm::device::cuda
