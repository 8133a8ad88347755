// SimulatedKernels: the element kernels of the simulated device: the CPU's, run on a stream.
#pragma once

#include <functional>
#include <utility>

#include "device/stream_kernels.hpp"

namespace zcomm::device {

class SimulatedKernels final : public StreamKernels {
 public:
  /// `put` queues a function on the stream; called with checked arguments, all captured by value.
  explicit SimulatedKernels(std::function<void(std::function<void()>)> put) : put_(std::move(put)) {}

  void reduce(const Reduce& args) override;
  void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) override;
  void run(const KernelTask& task) override;

 private:
  std::function<void(std::function<void()>)> put_;
};

}  // namespace zcomm::device
