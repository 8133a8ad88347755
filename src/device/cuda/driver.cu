// Loading libcuda (device/cuda/driver.hpp).
#include <dlfcn.h>

#include <memory>
#include <mutex>

#include "base/error.hpp"
#include "device/cuda/driver.hpp"

namespace zcomm::device::cuda {
namespace {

template <class Function>
void find(void* library, Function& function, const char* name) {
  void* const symbol = dlsym(library, name);
  if (symbol == nullptr) throw CudaError(text("the NVIDIA driver has no ", name, ": update it"));
  function = reinterpret_cast<Function>(symbol);
}

}  // namespace

Driver::Driver() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw CudaError(text("no NVIDIA driver: ", dlerror()));
  find(library, init, "cuInit");
  find(library, device_get, "cuDeviceGet");
  find(library, retain_primary, "cuDevicePrimaryCtxRetain");
  find(library, push, "cuCtxPushCurrent_v2");  // without _v2 they have the ABI of CUDA 3
  find(library, pop, "cuCtxPopCurrent_v2");
  find(library, address_range, "cuMemGetAddressRange_v2");
}

const Driver& Driver::load() {
  static std::mutex mutex;
  static const Driver* driver = nullptr;  // never unloaded, because streams may be destroyed late
  const std::lock_guard lock(mutex);
  if (driver == nullptr) driver = std::unique_ptr<const Driver>(new Driver).release();
  return *driver;
}

}  // namespace zcomm::device::cuda
