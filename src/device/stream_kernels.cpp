// The kernels that every device runs as tasks.
#include "device/stream_kernels.hpp"

#include <vector>

#include "device/codec_layout.hpp"
#include "device/cuda/tasks.hpp"

namespace zcomm::device {
namespace {

class ScaleTask final : public KernelTask {
 public:
  explicit ScaleTask(const Scale& args) : args_(args) {}
  const char* name() const override { return "scale"; }
  void touch(const std::function<void(const Touched&)>& each) const override {
    each({args_.src, args_.count * size_of(args_.src_dtype), false});
    each({args_.dst, args_.count * size_of(args_.dst_dtype), true});
    if (args_.more != nullptr) each({args_.more, sizeof(*args_.more), false});
    if (args_.nonfinite != nullptr) each({args_.nonfinite, sizeof(*args_.nonfinite), true});
  }
  void on_host() const override { device::scale(args_); }
  void on_cuda(std::uintptr_t stream) const override { cuda::launch_scale(args_, stream); }
  std::shared_ptr<const KernelTask> copy() const override { return std::make_shared<ScaleTask>(*this); }

 private:
  Scale args_;
};

class ChecksumTask final : public KernelTask {
 public:
  explicit ChecksumTask(const Checksum& args) : args_(args) {}
  const char* name() const override { return "checksum"; }
  void touch(const std::function<void(const Touched&)>& each) const override {
    each({args_.data, args_.nbytes, false});
    each({args_.sum, sizeof(*args_.sum), true});
  }
  void on_host() const override { device::checksum(args_); }
  void on_cuda(std::uintptr_t stream) const override { cuda::launch_checksum(args_, stream); }
  std::shared_ptr<const KernelTask> copy() const override { return std::make_shared<ChecksumTask>(*this); }

 private:
  Checksum args_;
};

class EncodeTask final : public KernelTask {
 public:
  EncodeTask(const Codec& codec, const Encode& args) : codec_(codec), args_(args) {}
  const char* name() const override { return "encode"; }
  void touch(const std::function<void(const Touched&)>& each) const override {
    const std::size_t count = args_.count;
    each({args_.in, count * size_of(args_.dtype), false});
    each({args_.out, encoded_nbytes(codec_, count), true});
    const bool coded = args_.error_dtype == DType::int8;
    if (args_.error != nullptr)
      each({args_.error, coded ? encoded_nbytes(kInt8Codec, count) : count * size_of(args_.error_dtype), true});
    if (args_.base != nullptr) each({args_.base, count * size_of(args_.base_dtype), true});
    if (args_.mask != nullptr) each({args_.mask, (count + 7) / 8, false});
  }
  void on_host() const override { device::encode(codec_, args_); }
  void on_cuda(std::uintptr_t stream) const override { cuda::launch_encode(codec_, args_, stream); }
  std::shared_ptr<const KernelTask> copy() const override { return std::make_shared<EncodeTask>(*this); }

 private:
  Codec codec_;
  Encode args_;
};

class DecodeTask final : public KernelTask {
 public:
  DecodeTask(const Codec& codec, const Decode& args) : codec_(codec), args_(args) {}
  const char* name() const override { return "decode_sum"; }
  void touch(const std::function<void(const Touched&)>& each) const override {
    for (const std::byte* in : args_.in) each({in, encoded_nbytes(codec_, args_.count), false});
    each({args_.out, args_.count * size_of(args_.dtype), true});
    if (args_.mask != nullptr) each({args_.mask, (args_.count + 7) / 8, false});
  }
  void on_host() const override { device::decode_sum(codec_, args_); }
  void on_cuda(std::uintptr_t stream) const override { cuda::launch_decode_sum(codec_, args_, stream); }
  std::shared_ptr<const KernelTask> copy() const override {
    auto own = std::make_shared<DecodeTask>(*this);
    own->kept_.assign(args_.in.begin(), args_.in.end());
    own->args_.in = own->kept_;
    return own;
  }

 private:
  Codec codec_;
  Decode args_;
  std::vector<const std::byte*> kept_;
};

class CopyListTask final : public KernelTask {
 public:
  explicit CopyListTask(const CopyList& list)
      : list_(list), count_(list.items.size()), chunks_(list.items.back().first_chunk + last_chunks(list)) {}
  const char* name() const override { return "copy_list"; }
  void touch(const std::function<void(const Touched&)>& each) const override {
    each({list_.on_device, count_ * sizeof(CopyItem), false});
    for (const CopyItem& item : list_.items) {
      each({item.src, item.count * size_of(list_.src_dtype), false});
      each({item.dst, item.count * size_of(list_.dst_dtype), true});
    }
  }
  void on_host() const override { device::copy_list(list_.on_device, count_, list_.dst_dtype, list_.src_dtype); }
  void on_cuda(std::uintptr_t stream) const override {
    cuda::launch_copy_list({list_.on_device, count_, chunks_, list_.dst_dtype, list_.src_dtype}, stream);
  }
  std::shared_ptr<const KernelTask> copy() const override {
    auto own = std::make_shared<CopyListTask>(*this);
    own->list_.items = {};  // points to the caller's memory
    return own;
  }

 private:
  static std::uint64_t last_chunks(const CopyList& list) {
    return (list.items.back().count + kCopyChunk - 1) / kCopyChunk;
  }
  CopyList list_;
  std::size_t count_;
  std::uint64_t chunks_;
};

}  // namespace

void StreamKernels::scale(const Scale& args) {
  check_scale(args);
  if (args.count > 0) run(ScaleTask(args));
}

void StreamKernels::copy_list(const CopyList& list) {
  check_copy_list(list);
  if (!list.items.empty()) run(CopyListTask(list));
}

void StreamKernels::checksum(const Checksum& args) {
  check_checksum(args);
  if (args.nbytes > 0) run(ChecksumTask(args));
}

void StreamKernels::encode(const Codec& codec, const Encode& args) {
  check_encode(codec, args);
  if (args.count > 0) run(EncodeTask(codec, args));
}

void StreamKernels::decode_sum(const Codec& codec, const Decode& args) {
  check_device_decode(codec, args);
  if (args.count > 0) run(DecodeTask(codec, args));
}

}  // namespace zcomm::device
