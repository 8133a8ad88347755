// See stream.hpp. Operations on a stream neither allocate nor wait, so a CUDA graph can capture them.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "device/cuda/kernels.hpp"
#include "device/cuda/stream.hpp"
#include "device/kernels_check.hpp"

namespace zcomm::device::cuda {
namespace {

CudaEvent& as_cuda(Event& event) {
  if (auto* const own = dynamic_cast<CudaEvent*>(&event)) return *own;
  throw InvalidArgument("CUDA stream: the event is of another kind of device");
}

}  // namespace

static_assert(kMaxBuffers >= kMaxKernelBuffers);

CudaEvent::CudaEvent(Gpu& gpu, bool shared) : gpu_(gpu), shared_(shared) {
  gpu_.enter("make_event");
  const DeviceScope scope(gpu_.index());
  const unsigned flags = cudaEventDisableTiming | (shared ? cudaEventInterprocess : cudaEventDefault);
  gpu_.check(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreateWithFlags");
}

CudaEvent::CudaEvent(Gpu& gpu, const SharedHandle& handle) : gpu_(gpu), shared_(true) {
  gpu_.enter("open_event");
  cudaIpcEventHandle_t native;
  static_assert(sizeof(native) == sizeof(handle.bytes));
  std::memcpy(&native, handle.bytes.data(), sizeof(native));
  const DeviceScope scope(gpu_.index());
  gpu_.check_handle(cudaIpcOpenEventHandle(&event_, native), "cudaIpcOpenEventHandle");
}

CudaEvent::~CudaEvent() {
  try {
    const DeviceScope scope(gpu_.index());
    if (event_ != nullptr && cudaEventDestroy(event_) != cudaSuccess) cudaGetLastError();
  } catch (const Error&) {  // the context is lost, and the event with it
  }
}

bool CudaEvent::done() {
  gpu_.enter("Event::done");
  const DeviceScope scope(gpu_.index());
  const BesideCapture beside;
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  gpu_.check(result, "cudaEventQuery");
  return true;
}

/// cudaEventSynchronize spins; for a blocking event, it slows down every other use of the event.
void CudaEvent::synchronize() {
  while (!wait_for(1.0)) {
  }
}

/// CUDA has no wait with a deadline, so it sleeps for periods that grow with the time waited: a short wait ends soon
/// and a long one costs little.
bool CudaEvent::wait_for(double patience_s) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::duration<double> kShortest(10e-6), kLongest(500e-6);
  const auto start = Clock::now();
  while (!done()) {
    const std::chrono::duration<double> waited = Clock::now() - start;
    if (waited.count() >= patience_s) return false;
    std::this_thread::sleep_for(std::clamp(waited / 8, kShortest, kLongest));
  }
  return true;
}

SharedHandle CudaEvent::handle() {
  if (!shared_) throw InvalidArgument("Event::handle: the event was not made with shared");
  gpu_.enter("Event::handle");
  const DeviceScope scope(gpu_.index());
  cudaIpcEventHandle_t native;
  gpu_.check(cudaIpcGetEventHandle(&native, event_), "cudaIpcGetEventHandle");
  SharedHandle handle;
  std::memcpy(handle.bytes.data(), &native, sizeof(native));
  return handle;
}

CudaStream::CudaStream(Gpu& gpu, bool urgent) : gpu_(gpu), owned_(true) {
  gpu_.enter("make_stream");
  const DeviceScope scope(gpu_.index());
  int least = 0, greatest = 0;
  gpu_.check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  gpu_.check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, urgent ? greatest : least),
             "cudaStreamCreateWithPriority");
}

CudaStream::~CudaStream() {
  if (!owned_) return;
  try {
    const DeviceScope scope(gpu_.index());
    if (cudaStreamDestroy(stream_) != cudaSuccess) cudaGetLastError();  // queued work still runs
  } catch (const Error&) {                                              // the context is lost, and the stream with it
  }
}

void CudaStream::record(Event& event) {
  CudaEvent& own = as_cuda(event);
  gpu_.begin_operation("Stream::record");
  const DeviceScope scope(gpu_.index());  // the default stream belongs to the current device
  gpu_.check(cudaEventRecord(own.native(), stream_), "cudaEventRecord");
}

void CudaStream::wait(Event& event) {
  CudaEvent& own = as_cuda(event);
  gpu_.begin_operation("Stream::wait");
  const DeviceScope scope(gpu_.index());  // the default stream belongs to the current device
  gpu_.check(cudaStreamWaitEvent(stream_, own.native(), 0), "cudaStreamWaitEvent");
}

void CudaStream::copy(void* dst, const void* src, std::size_t nbytes) {
  check_pointers("copy", dst, src, nbytes);
  if (nbytes == 0) return;
  gpu_.begin_operation("Stream::copy");
  const DeviceScope scope(gpu_.index());
  gpu_.check(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
}

void CudaStream::fill(void* dst, std::uint8_t value, std::size_t nbytes) {
  check_pointers("fill", dst, dst, nbytes);
  if (nbytes == 0) return;
  gpu_.begin_operation("Stream::fill");
  const DeviceScope scope(gpu_.index());
  gpu_.check(cudaMemsetAsync(dst, value, nbytes, stream_), "cudaMemsetAsync");
}

bool CudaStream::done() {
  gpu_.enter("Stream::done");
  const DeviceScope scope(gpu_.index());
  const BesideCapture beside;
  const cudaError_t result = cudaStreamQuery(stream_);
  if (result == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  gpu_.check(result, "cudaStreamQuery");
  return true;
}

/// By an event with a sleeping wait; cudaStreamSynchronize may spin.
void CudaStream::synchronize() {
  gpu_.enter("Stream::synchronize");
  const DeviceScope scope(gpu_.index());
  if (!end_) end_ = std::make_unique<CudaEvent>(gpu_, false);
  gpu_.check(cudaEventRecord(end_->native(), stream_), "cudaEventRecord");
  end_->synchronize();
}

void CudaStream::reduce(const Reduce& args) {
  check_device_reduce(args);
  if (args.count == 0) return;
  ReduceLaunch launch{};
  std::copy(args.dst.begin(), args.dst.end(), launch.dst);
  std::copy(args.src.begin(), args.src.end(), launch.src);
  launch.dst_count = static_cast<int>(args.dst.size());
  launch.src_count = static_cast<int>(args.src.size());
  launch.count = args.count;
  launch.in = args.in;
  launch.out = args.out;
  launch.op = args.op;
  launch.accumulate = args.accumulate;
  launch.remote = args.remote;
  gpu_.begin_operation("reduce");
  const DeviceScope scope(gpu_.index());
  launch_reduce(launch, stream_);
  gpu_.check(cudaGetLastError(), "reduce");
}

void CudaStream::cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) {
  check_cast(dst, dst_dtype, src, src_dtype, count);
  if (dst_dtype == src_dtype) return copy(dst, src, count * size_of(dst_dtype));
  if (count == 0) return;
  gpu_.begin_operation("cast");
  const DeviceScope scope(gpu_.index());
  launch_cast(dst, dst_dtype, src, src_dtype, count, stream_);
  gpu_.check(cudaGetLastError(), "cast");
}

void CudaStream::run(const KernelTask& task) {
  gpu_.begin_operation(task.name());
  const DeviceScope scope(gpu_.index());
  task.on_cuda(native());
  gpu_.check(cudaGetLastError(), task.name());
}

}  // namespace zcomm::device::cuda
