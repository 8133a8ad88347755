// Finding GPUs, and wording their errors (device/cuda/gpu.hpp).
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "device/cuda/driver.hpp"
#include "device/cuda/gpu.hpp"
#include "device/device_errors.hpp"

namespace zcomm::device::cuda {
namespace {

struct Found {
  int count = 0;
  cudaError_t error = cudaSuccess;
};

/// Queried once, because without a driver the answer does not change while the process lives. A forked child cannot use
/// CUDA that its parent has started, so it finds no device.
const Found& found() {
  static const int asker = fork_generation();
  static const Found result = [] {
    Found f;
    f.error = cudaGetDeviceCount(&f.count);
    if (f.error != cudaSuccess) {
      f.count = 0;
      cudaGetLastError();
    }
    return f;
  }();
  static const Found in_a_child{0, cudaErrorInitializationError};
  return asker == fork_generation() ? result : in_a_child;
}

std::string absence() {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  cudaGetLastError();
  const cudaError_t error = found().error;
  const Absence why = driver == 0                                          ? Absence::no_driver
                      : error == cudaErrorInsufficientDriver               ? Absence::old_driver
                      : error == cudaErrorInitializationError              ? Absence::forked
                      : error == cudaSuccess || error == cudaErrorNoDevice ? Absence::none_shown
                                                                           : Absence::other;
  return no_device_text(why, driver, CUDART_VERSION, cudaGetErrorString(error));
}

const char* advice(cudaError_t error) {
  switch (error) {
    case cudaErrorDevicesUnavailable:
      return "; another process may hold it (compute mode exclusive), or it is off the bus: see nvidia-smi and "
             "`dmesg | grep -i xid`";
    case cudaErrorNoKernelImageForDevice:
      return "; this build has no code for this GPU: build zcomm with -DCMAKE_CUDA_ARCHITECTURES=native (8.0, Ampere, "
             "or later)";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
      return "; a CUDA graph is being captured: device.hpp says which calls it can take";
    default:
      return "";
  }
}

}  // namespace

bool available() { return found().count > 0; }
int device_count() { return found().count; }
std::vector<std::string> uuids() {
  std::vector<std::string> all;
  for (int index = 0; index < device_count(); ++index) all.push_back(Gpu::at(index).uuid());
  return all;
}
std::string build_info() { return text("CUDA ", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10); }

bool ends_the_context(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDeviceUninitialized:
    case cudaErrorMpsClientTerminated:
    case cudaErrorUnknown:
      return true;
    default:  // older toolkits do not define cudaErrorContained, cudaErrorExternalDevice
      return static_cast<int>(error) == 226 || static_cast<int>(error) == 911;
  }
}

std::string describe(const char* what, cudaError_t error) {
  return text(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

Gpu& Gpu::at(int index) {
  if (!available()) throw CudaError(absence());
  if (index < 0 || index >= device_count())
    throw InvalidArgument(text("cuda:", index, " is not there: expected one of cuda:0 to cuda:", device_count() - 1));
  static std::mutex mutex;
  static std::deque<Gpu>& all = *new std::deque<Gpu>;  // never destroyed, because streams may be destroyed late
  const std::lock_guard lock(mutex);
  while (static_cast<int>(all.size()) <= index) all.emplace_back(static_cast<int>(all.size()));
  return all[static_cast<std::size_t>(index)];
}

Gpu::Gpu(int index) : index_(index), name_(text("cuda:", index)) {}

std::string Gpu::uuid() {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index_), "cudaGetDeviceProperties");
  std::string hex;
  for (const char byte : properties.uuid.bytes)
    for (const int shift : {4, 0}) hex += "0123456789abcdef"[(static_cast<unsigned char>(byte) >> shift) & 15];
  return hex;
}

void* Gpu::context() {
  if (void* const context = context_.load(std::memory_order_acquire)) return context;
  const std::lock_guard lock(starting_);
  if (void* const context = context_.load(std::memory_order_relaxed)) return context;
  const Driver& driver = Driver::load();
  void* started = nullptr;
  int device = 0, result = driver.init(0);
  if (result == 0) result = driver.device_get(&device, index_);
  if (result == 0) result = driver.retain_primary(&started, device);
  if (result != 0) {
    const auto error = static_cast<cudaError_t>(result);
    throw CudaError(text(name_, ": ", describe("start of CUDA", error), advice(error)));
  }
  context_.store(started, std::memory_order_release);
  return started;
}

void Gpu::push() {
  void* const started = context();
  check(static_cast<cudaError_t>(Driver::load().push(started)), "cuCtxPushCurrent");
}

void Gpu::pop() noexcept {
  void* popped = nullptr;
  Driver::load().pop(&popped);
}

void Gpu::check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // a plain error must not appear again in a later call
  if (ends_the_context(result)) throw CudaError(lost_text(name_, describe(what, result)));
  if (result == cudaErrorMemoryAllocation) check_allocation(result, what, 0);
  throw CudaError(text(name_, ": ", describe(what, result), advice(result)));
}

void Gpu::check_allocation(cudaError_t result, const char* what, std::size_t nbytes) {
  if (result != cudaErrorMemoryAllocation) return check(result, what);
  cudaGetLastError();
  std::size_t free_nbytes = 0, total_nbytes = 0;
  const DeviceScope scope(index_);
  if (cudaMemGetInfo(&free_nbytes, &total_nbytes) != cudaSuccess) cudaGetLastError();
  if (nbytes == 0) throw CudaError(text(name_, ": ", describe(what, result), ": ", free_nbytes, " bytes are free"));
  throw CudaError(out_of_memory_text(name_, nbytes, free_nbytes, total_nbytes));
}

void Gpu::check_handle(cudaError_t result, const char* what) {
  if (result != cudaErrorDeviceUninitialized) return check(result, what);
  cudaGetLastError();
  throw InvalidArgument(text(name_, ": ", describe(what, result), ": the handle is of this same process"));
}

void Gpu::enter(const char* what) {
  if (lost_.load(std::memory_order_relaxed)) throw CudaError(lost_text(name_, text(what, ": simulated loss")));
}

void Gpu::begin_operation(const char* what) {
  if (left_.load(std::memory_order_relaxed) != 0 && left_.fetch_sub(1) == 1) lost_ = true;
  enter(what);
}

void Gpu::lose_after(std::uint64_t n) {
  left_ = n;
  lost_ = false;
}

bool page_lock(void* data, std::size_t nbytes) {
  if (!available() || nbytes == 0) return false;
  std::optional<DeviceScope> scope;
  if (const int device = home_device(); device >= 0) scope.emplace(device);
  const cudaError_t result = cudaHostRegister(data, nbytes, cudaHostRegisterPortable);
  if (result == cudaSuccess) return true;
  cudaGetLastError();
  if (ends_the_context(result)) throw CudaError(lost_text("cuda", describe("cudaHostRegister", result)));
  throw PageLockRefused(text("page locking ", nbytes, " bytes: ", describe("cudaHostRegister", result),
                             "; see `ulimit -l`, the container's memory limit, and the budget of pinned memory"));
}

void page_unlock(void* data) noexcept {
  if (!available()) return;
  try {
    std::optional<DeviceScope> scope;
    if (const int device = home_device(); device >= 0) scope.emplace(device);
    if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();
  } catch (const Error&) {  // the context is lost, and the lock with it
  }
}

std::atomic<int>& home_device() {
  static std::atomic<int> device{-1};
  return device;
}

DeviceScope::DeviceScope(int device) { Gpu::at(device).push(); }
DeviceScope::~DeviceScope() { Gpu::pop(); }

}  // namespace zcomm::device::cuda
