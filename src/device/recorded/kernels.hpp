// RecordedKernels: notes which bytes a kernel reads and writes, and passes it on (device/recorded/trace.hpp).
#pragma once

#include <functional>
#include <utility>

#include "device/recorded/trace.hpp"

namespace zcomm::device {

class RecordedKernels final : public StreamKernels {
 public:
  /// `note` is called before the kernel is passed on.
  RecordedKernels(StreamKernels& inner, std::function<void(const char* label, const Footprint&)> note)
      : inner_(inner), note_(std::move(note)) {}

  void reduce(const Reduce& args) override;
  void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) override;
  void run(const KernelTask& task) override;

 private:
  StreamKernels& inner_;
  std::function<void(const char*, const Footprint&)> note_;
};

}  // namespace zcomm::device
