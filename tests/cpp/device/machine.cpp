#include "device/machine.hpp"

#include <new>

#include "device/emulated_kernels.hpp"

namespace zcomm::test {
namespace {

/// Anew for each length: the sanitizer sees the end.
class HostMemory {
 public:
  ~HostMemory() { release(); }
  std::byte* at_least(std::size_t nbytes) {
    if (nbytes > nbytes_) {
      release();
      data_ = static_cast<std::byte*>(::operator new(nbytes, kAlign));
      nbytes_ = nbytes;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlign{256};
  void release() {
    if (data_ != nullptr) ::operator delete(data_, kAlign);
  }
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

}  // namespace

std::vector<std::unique_ptr<Machine>> machines() {
  std::vector<std::unique_ptr<Machine>> all;
  all.push_back(std::make_unique<Emulation>());
  return all;
}

}  // namespace zcomm::test
