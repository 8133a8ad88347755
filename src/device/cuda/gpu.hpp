// Gpu: the state that all Device objects of one GPU share in this process: its name, whether it is lost, its errors.
//
// [Note: contexts] cudaSetDevice starts the device that it names, some 500 MB of it; and a thread that has named none
// counts as using device 0, so setting "back" starts device 0. So a DeviceScope pushes the primary context of its
// device (shared with the runtime and torch) and pops it, which affects no other device; and nothing that needs a
// context is called outside of a scope, not even a query of an event. [Note: CUDA's errors] An error that ends the
// context (a bad address, ECC, the device lost from the bus) is returned by every later call: the process must be
// restarted, as the message explains. Other errors concern one call. Only the *.cu include this. Thread rule:
// free-threaded.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "device/cuda/cuda.hpp"

namespace zcomm::device::cuda {

/// Whether this error ends the context.
bool ends_the_context(cudaError_t error);
/// "cudaMemcpyAsync: cudaErrorInvalidValue: invalid argument"
std::string describe(const char* what, cudaError_t error);

/// While it lives, the calling thread may make calls that another thread's capture of a CUDA graph forbids (queries,
/// allocations) without invalidating that capture.
class BesideCapture {
 public:
  BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCapture(const BesideCapture&) = delete;
  BesideCapture& operator=(const BesideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// The device that this process has opened last, or -1. Host memory is locked there, because a call on another device
/// would create a context of some hundred MB on it.
std::atomic<int>& home_device();

class Gpu {
 public:
  /// The only Gpu of its index. Throws CudaError without driver or device, InvalidArgument for other indices.
  static Gpu& at(int index);
  explicit Gpu(int index);

  int index() const { return index_; }
  const std::string& name() const { return name_; }
  std::string uuid();  ///< in hex
  void* context();     ///< the primary context, started by the first call; throws CudaError
  void push();         ///< makes it current for the calling thread, until pop(); throws CudaError
  static void pop() noexcept;

  /// Throws CudaError unless the result is success.
  void check(cudaError_t result, const char* what);
  /// check() of an allocation of that many bytes.
  void check_allocation(cudaError_t result, const char* what, std::size_t nbytes);
  /// check() of opening another process's handle; InvalidArgument for one of this process.
  void check_handle(cudaError_t result, const char* what);
  /// Throws CudaError while the test hook reports that the GPU is lost.
  void enter(const char* what);
  /// enter() for an operation on a stream; counts towards lose_after.
  void begin_operation(const char* what);
  void lose_after(std::uint64_t n);

 private:
  const int index_;
  const std::string name_;
  std::atomic<std::uint64_t> left_{0};
  std::atomic<bool> lost_{false};
  std::atomic<void*> context_{nullptr};
  std::mutex starting_;
};

}  // namespace zcomm::device::cuda
