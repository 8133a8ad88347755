// The CUDA device: its memory, streams and events (device/device.hpp).
//
// Memory comes from cudaMalloc, because legacy IPC handles can name it. Freeing it waits for the whole GPU: allocate
// once, not in the steady state. Thread rule: as the CUDA runtime; the calling thread's current device is not changed.
#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "device/cuda/driver.hpp"
#include "device/cuda/stream.hpp"

namespace zcomm::device {
namespace cuda {
namespace {

/// The beginning of the allocation that holds `data`.
const std::byte* base_of(Gpu& gpu, const void* data) {
  unsigned long long base = 0;
  std::size_t nbytes = 0;
  const int result = Driver::load().address_range(&base, &nbytes, reinterpret_cast<unsigned long long>(data));
  if (result != 0)
    throw InvalidArgument(text(gpu.name(), ": share: ", data, " is not device memory (CUresult ", result, ")"));
  return reinterpret_cast<const std::byte*>(base);
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(Gpu& gpu) : gpu_(gpu) {
    const DeviceScope scope(gpu_.index());
    gpu_.check(cudaFree(nullptr), "start of CUDA");  // makes the context, if torch has not
    home_device() = gpu_.index();
  }

  const std::string& name() const override { return gpu_.name(); }
  std::string uuid() const override { return gpu_.uuid(); }
  std::unique_ptr<Stream> make_stream(bool urgent) override { return std::make_unique<CudaStream>(gpu_, urgent); }
  std::unique_ptr<Stream> adopt_stream(std::uintptr_t native) override {
    gpu_.enter("adopt_stream");
    return std::make_unique<CudaStream>(gpu_, reinterpret_cast<cudaStream_t>(native));
  }
  std::unique_ptr<Event> make_event(bool shared) override { return std::make_unique<CudaEvent>(gpu_, shared); }

  Memory allocate(std::size_t nbytes) override {
    gpu_.enter("allocate");
    const DeviceScope scope(gpu_.index());
    const BesideCapture beside;
    void* data = nullptr;
    gpu_.check_allocation(cudaMalloc(&data, nbytes), "cudaMalloc", nbytes);
    return {data, [&gpu = gpu_](void* memory) noexcept { release(gpu, memory, &cudaFree); }};
  }
  MemoryInfo memory() override {
    gpu_.enter("memory");
    const DeviceScope scope(gpu_.index());
    MemoryInfo info{};
    gpu_.check(cudaMemGetInfo(&info.free_nbytes, &info.total_nbytes), "cudaMemGetInfo");
    return info;
  }

  SharedHandle share(const void* data) override {
    gpu_.enter("share");
    const DeviceScope scope(gpu_.index());
    const std::byte* const base = base_of(gpu_, data);
    cudaIpcMemHandle_t native;
    const cudaError_t result = cudaIpcGetMemHandle(&native, const_cast<std::byte*>(base));
    if (result == cudaErrorInvalidValue || result == cudaErrorNotSupported) {
      cudaGetLastError();
      throw Unsupported(text(gpu_.name(), ": share: ", describe("cudaIpcGetMemHandle", result),
                             "; memory of other allocators than cudaMalloc has no such handle (of torch: set "
                             "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)"));
    }
    gpu_.check(result, "cudaIpcGetMemHandle");
    SharedHandle handle;
    static_assert(sizeof(native) == sizeof(handle.bytes));
    std::memcpy(handle.bytes.data(), &native, sizeof(native));
    handle.offset = static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - base);
    return handle;
  }
  Memory open_memory(const SharedHandle& handle) override {
    gpu_.enter("open_memory");
    const DeviceScope scope(gpu_.index());
    cudaIpcMemHandle_t native;
    std::memcpy(&native, handle.bytes.data(), sizeof(native));
    void* base = nullptr;
    const cudaError_t result = cudaIpcOpenMemHandle(&base, native, cudaIpcMemLazyEnablePeerAccess);
    gpu_.check_handle(result, "cudaIpcOpenMemHandle");
    const Memory all(base, [&gpu = gpu_](void* memory) noexcept { release(gpu, memory, &cudaIpcCloseMemHandle); });
    return {all, static_cast<std::byte*>(base) + handle.offset};
  }
  std::unique_ptr<Event> open_event(const SharedHandle& handle) override {
    return std::make_unique<CudaEvent>(gpu_, handle);
  }
  void push_current() override { gpu_.push(); }
  void pop_current() noexcept override { Gpu::pop(); }
  void lose_after(std::uint64_t n) override { gpu_.lose_after(n); }

 private:
  /// When the process ends, the context may be destroyed before the memory's owner.
  static void release(Gpu& gpu, void* memory, cudaError_t (*how)(void*)) noexcept {
    try {
      const DeviceScope scope(gpu.index());
      const BesideCapture beside;
      if (how(memory) != cudaSuccess) cudaGetLastError();
    } catch (const Error&) {
      cudaGetLastError();
    }
  }

  Gpu& gpu_;
};

}  // namespace
}  // namespace cuda

std::shared_ptr<Device> make_cuda_device(int index) { return std::make_shared<cuda::CudaDevice>(cuda::Gpu::at(index)); }

}  // namespace zcomm::device
