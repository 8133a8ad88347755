// CUDA's streams and events behind the interface of device/device.hpp. Only the *.cu include this.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "device/cuda/gpu.hpp"
#include "device/device.hpp"

namespace zcomm::device::cuda {

class CudaEvent final : public Event {
 public:
  CudaEvent(Gpu& gpu, bool shared);
  CudaEvent(Gpu& gpu, const SharedHandle& handle);
  ~CudaEvent() override;
  bool done() override;
  void synchronize() override;
  bool wait_for(double patience_s) override;
  SharedHandle handle() override;

  cudaEvent_t native() const { return event_; }

 private:
  Gpu& gpu_;
  const bool shared_;
  cudaEvent_t event_ = nullptr;
};

class CudaStream final : public Stream, private StreamKernels {
 public:
  /// Creates and owns a non-blocking stream.
  CudaStream(Gpu& gpu, bool urgent);
  /// Borrows a stream.
  CudaStream(Gpu& gpu, cudaStream_t stream) : gpu_(gpu), stream_(stream) {}
  ~CudaStream() override;

  void record(Event& event) override;
  void wait(Event& event) override;
  void copy(void* dst, const void* src, std::size_t nbytes) override;
  void fill(void* dst, std::uint8_t value, std::size_t nbytes) override;
  StreamKernels& kernels() override { return *this; }
  bool done() override;
  void synchronize() override;
  std::uintptr_t native() const override { return reinterpret_cast<std::uintptr_t>(stream_); }

 private:
  void reduce(const Reduce& args) override;
  void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) override;
  void run(const KernelTask& task) override;

  Gpu& gpu_;
  cudaStream_t stream_ = nullptr;
  bool owned_ = false;
  std::unique_ptr<CudaEvent> end_;  ///< of synchronize, created at first use
};

}  // namespace zcomm::device::cuda
