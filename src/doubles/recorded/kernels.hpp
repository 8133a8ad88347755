// RecordedKernels: reports which bytes a kernel reads and writes, and forwards it (doubles/recorded/trace.hpp).
#pragma once

#include <functional>
#include <utility>

#include "doubles/recorded/trace.hpp"

namespace zcomm::device {

class RecordedKernels final : public StreamKernels {
 public:
  /// `on_access` is called before the kernel is forwarded.
  RecordedKernels(StreamKernels& inner, std::function<void(const char* label, const Footprint&)> on_access)
      : inner_(inner), on_access_(std::move(on_access)) {}

  void reduce(const Reduce& args) override;
  void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) override;
  void run(const KernelTask& task) override;

 private:
  StreamKernels& inner_;
  std::function<void(const char*, const Footprint&)> on_access_;
};

}  // namespace zcomm::device
