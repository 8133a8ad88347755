#include "device/machine.hpp"

#include <new>

#include "device/cuda/cuda.hpp"
#include "device/emulated_kernels.hpp"
#include "doubles/simulated/device.hpp"

namespace zcomm::test {
namespace {

/// Page-locked on machines with a GPU, which then addresses it as the host does.
class HostMemory {
 public:
  ~HostMemory() { release(); }
  std::byte* at_least(std::size_t nbytes) {
    if (nbytes > nbytes_) {
      release();
      data_ = static_cast<std::byte*>(::operator new(nbytes, kAlign));
      nbytes_ = nbytes;
      locked_ = device::cuda::page_lock(data_, nbytes_);
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlign{4096};
  void release() {
    if (locked_) device::cuda::page_unlock(data_);
    if (data_ != nullptr) ::operator delete(data_, kAlign);
  }
  bool locked_ = false;
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
};

class Emulation final : public Machine {
 public:
  std::string name() const override { return "emulation"; }
  std::byte* memory(std::size_t nbytes) override { return memory_.at_least(nbytes); }
  void reduce(const device::Reduce& args) override { device::emulated::reduce(args); }
  void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) override {
    device::emulated::cast(dst, dst_dtype, src, src_dtype, count);
  }
  void scale(const device::Scale& args) override { device::emulated::launch_scale(args, 0); }
  void checksum(const device::Checksum& args) override { device::emulated::launch_checksum(args, 0); }
  void encode(const Codec& codec, const device::Encode& args) override {
    device::emulated::launch_encode(codec, args, 0);
  }
  void decode_sum(const Codec& codec, const device::Decode& args) override {
    device::emulated::launch_decode_sum(codec, args, 0);
  }
  void copy_list(const device::CopyList& list) override {
    const auto& last = list.items.back();
    device::emulated::launch_copy_list(
        {list.on_device, list.items.size(),
         last.first_chunk + (last.count + device::kCopyChunk - 1) / device::kCopyChunk, list.dst_dtype, list.src_dtype},
        0);
  }

 private:
  HostMemory memory_;
};

/// A device's kernels on a stream of it.
class OnStream final : public Machine {
 public:
  explicit OnStream(std::shared_ptr<device::Device> device)
      : device_(std::move(device)), stream_(device_->make_stream()) {}
  std::string name() const override { return device_->name(); }
  std::byte* memory(std::size_t nbytes) override { return memory_.at_least(nbytes); }
  void reduce(const device::Reduce& args) override { stream_->kernels().reduce(args); }
  void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) override {
    stream_->kernels().cast(dst, dst_dtype, src, src_dtype, count);
  }
  void scale(const device::Scale& args) override { stream_->kernels().scale(args); }
  void checksum(const device::Checksum& args) override { stream_->kernels().checksum(args); }
  void encode(const Codec& codec, const device::Encode& args) override { stream_->kernels().encode(codec, args); }
  void decode_sum(const Codec& codec, const device::Decode& args) override {
    stream_->kernels().decode_sum(codec, args);
  }
  void copy_list(const device::CopyList& list) override { stream_->kernels().copy_list(list); }
  void synchronize() override { stream_->synchronize(); }

 private:
  HostMemory memory_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
};

}  // namespace

std::vector<std::unique_ptr<Machine>> machines() {
  std::vector<std::unique_ptr<Machine>> all;
  all.push_back(std::make_unique<Emulation>());
  all.push_back(std::make_unique<OnStream>(device::make_simulated_device()));
  if (device::cuda::available()) all.push_back(std::make_unique<OnStream>(device::make_cuda_device(0)));
  return all;
}

}  // namespace zcomm::test
