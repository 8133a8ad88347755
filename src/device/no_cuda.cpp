// The accelerator of a build without CUDA: nothing is available, and using it says so.
#include "base/error.hpp"
#include "device/cuda.hpp"
#include "device/device.hpp"

namespace zcomm::device::cuda {
namespace {

[[noreturn]] void unsupported(const char* what) {
  throw Unsupported(text(what, ": zcomm was built without CUDA; install a build with CUDA or use device=\"cpu\""));
}

}  // namespace

bool available() { return false; }
int device_count() { return 0; }
std::string build_info() { return "built without CUDA"; }

bool page_lock(void*, std::size_t) { return false; }
void page_unlock(void*) noexcept {}

DeviceScope::DeviceScope(int) { unsupported("cuda::DeviceScope"); }
DeviceScope::~DeviceScope() = default;

Stream::Stream(int) { unsupported("cuda::Stream"); }
Stream::Stream(Stream&&) noexcept = default;
Stream::~Stream() = default;
void Stream::synchronize() { unsupported("cuda::Stream::synchronize"); }
void Stream::copy(void*, const void*, std::size_t) { unsupported("cuda::Stream::copy"); }
void Stream::reduce(const Reduce&) { unsupported("cuda::Stream::reduce"); }
void Stream::cast(void*, DType, const void*, DType, std::size_t) { unsupported("cuda::Stream::cast"); }

Event::Event(int) { unsupported("cuda::Event"); }
Event::Event(Event&&) noexcept = default;
Event::~Event() = default;
void Event::record(Stream&) { unsupported("cuda::Event::record"); }
void Event::wait(Stream&) { unsupported("cuda::Event::wait"); }
bool Event::done() const { unsupported("cuda::Event::done"); }

}  // namespace zcomm::device::cuda

namespace zcomm::device {

std::shared_ptr<Device> make_cuda_device(int) { cuda::unsupported("make_cuda_device"); }

}  // namespace zcomm::device
