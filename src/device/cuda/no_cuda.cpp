// The accelerator of a build without CUDA: nothing is available, and each use throws Unsupported.
#include "base/error.hpp"
#include "device/cuda/cuda.hpp"
#include "device/device.hpp"

namespace zcomm::device {
namespace {

[[noreturn]] void unsupported(const char* what) {
  throw Unsupported(
      text(what,
           ": zcomm was built without CUDA; install it with CUDA (ZCOMM_CUDA=ON pip install .) or use device=\"cpu\""));
}

}  // namespace

namespace cuda {

bool available() { return false; }
int device_count() { return 0; }
std::vector<std::string> uuids() { return {}; }
std::string build_info() { return "built without CUDA"; }

bool page_lock(void*, std::size_t) { return false; }
void page_unlock(void*) noexcept {}

DeviceScope::DeviceScope(int) { unsupported("cuda::DeviceScope"); }
DeviceScope::~DeviceScope() = default;

}  // namespace cuda

std::shared_ptr<Device> make_cuda_device(int) { unsupported("make_cuda_device"); }

}  // namespace zcomm::device
