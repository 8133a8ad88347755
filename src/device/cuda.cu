// The accelerator by the CUDA runtime: streams, events, copies, page locking.
//
// Thread rule: as the CUDA runtime; the calling thread's current device is left as it was.
#include <cuda_runtime_api.h>

#include <utility>

#include "base/error.hpp"
#include "device/cuda.hpp"
#include "device/cuda_kernels.hpp"
#include "device/kernels_check.hpp"

namespace zcomm::device::cuda {
namespace {

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // a plain error must not surface again in a later call
  throw CudaError(text(what, ": ", cudaGetErrorName(result), ": ", cudaGetErrorString(result)));
}

cudaStream_t stream_of(std::uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }
cudaEvent_t event_of(std::uintptr_t handle) { return reinterpret_cast<cudaEvent_t>(handle); }

struct Found {
  int count = 0;
  cudaError_t error = cudaSuccess;
};

/// Asked once: without a driver the answer does not change while the process lives.
const Found& found() {
  static const Found result = [] {
    Found f;
    f.error = cudaGetDeviceCount(&f.count);
    if (f.error != cudaSuccess) {
      f.count = 0;
      cudaGetLastError();
    }
    return f;
  }();
  return result;
}

void check_device(int device, const char* what) {
  if (!available())
    throw Unsupported(text(what, ": no CUDA device (", cudaGetErrorString(found().error), "); use device=\"cpu\""));
  if (device < 0 || device >= device_count())
    throw InvalidArgument(text(what, ": device ", device, " is not one of ", device_count()));
}

}  // namespace

bool available() { return found().count > 0; }
int device_count() { return found().count; }
std::string build_info() { return text("CUDA ", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10); }

bool page_lock(void* data, std::size_t nbytes) {
  if (!available() || nbytes == 0) return false;
  check(cudaHostRegister(data, nbytes, cudaHostRegisterPortable), "cudaHostRegister");
  return true;
}

void page_unlock(void* data) noexcept {
  if (!available()) return;
  if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();
}

DeviceScope::DeviceScope(int device) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  check(cudaSetDevice(device), "cudaSetDevice");
}

DeviceScope::~DeviceScope() { cudaSetDevice(before_); }

Stream::Stream(int device) : device_(device) {
  check_device(device, "cuda::Stream");
  const DeviceScope scope(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  handle_ = reinterpret_cast<std::uintptr_t>(stream);
}

Stream::Stream(Stream&& other) noexcept : device_(other.device_), handle_(std::exchange(other.handle_, 0)) {}

Stream::~Stream() {
  if (handle_ != 0) cudaStreamDestroy(stream_of(handle_));
}

void Stream::synchronize() { check(cudaStreamSynchronize(stream_of(handle_)), "cudaStreamSynchronize"); }

void Stream::copy(void* dst, const void* src, std::size_t nbytes) {
  if (nbytes == 0) return;
  const DeviceScope scope(device_);
  check(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream_of(handle_)), "cudaMemcpyAsync");
}

void Stream::reduce(const Reduce& args) {
  check_reduce(args);
  if (args.dst.size() > kMaxBuffers || args.src.size() > kMaxBuffers)
    throw InvalidArgument(text("cuda::Stream::reduce: ", args.dst.size(), " dst and ", args.src.size(),
                               " src; at most ", kMaxBuffers, " of each"));
  if (args.count == 0) return;
  ReduceLaunch launch{};
  for (std::size_t d = 0; d < args.dst.size(); ++d) launch.dst[d] = args.dst[d];
  for (std::size_t s = 0; s < args.src.size(); ++s) launch.src[s] = args.src[s];
  launch.dst_count = static_cast<int>(args.dst.size());
  launch.src_count = static_cast<int>(args.src.size());
  launch.count = args.count;
  launch.in = args.in;
  launch.out = args.out;
  launch.op = args.op;
  launch.accumulate = args.accumulate;
  const DeviceScope scope(device_);
  launch_reduce(launch, stream_of(handle_));
  check(cudaGetLastError(), "cuda::Stream::reduce");
}

void Stream::cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) {
  check_cast(dst, dst_dtype, src, src_dtype, count);
  if (count == 0) return;
  if (dst_dtype == src_dtype) return copy(dst, src, count * size_of(dst_dtype));
  const DeviceScope scope(device_);
  launch_cast(dst, dst_dtype, src, src_dtype, count, stream_of(handle_));
  check(cudaGetLastError(), "cuda::Stream::cast");
}

Event::Event(int device) {
  check_device(device, "cuda::Event");
  const DeviceScope scope(device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  handle_ = reinterpret_cast<std::uintptr_t>(event);
}

Event::Event(Event&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}

Event::~Event() {
  if (handle_ != 0) cudaEventDestroy(event_of(handle_));
}

void Event::record(Stream& stream) {
  check(cudaEventRecord(event_of(handle_), stream_of(stream.handle())), "cudaEventRecord");
}

void Event::wait(Stream& stream) {
  check(cudaStreamWaitEvent(stream_of(stream.handle()), event_of(handle_), 0), "cudaStreamWaitEvent");
}

bool Event::done() const {
  const cudaError_t result = cudaEventQuery(event_of(handle_));
  if (result == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(result, "cudaEventQuery");
  return true;
}

}  // namespace zcomm::device::cuda
