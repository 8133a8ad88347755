// Device: an accelerator as the rest of the core uses it: memory, streams and events.
//
// It is implemented by CUDA (device/cuda, or no_cuda.cpp in builds without it), by a simulated device (its streams are
// threads of this process, its memory is the host's; doubles/simulated), or by a recorder around either that records
// which stream touched which memory in which order (doubles/recorded). The logic above is the same for all, and is
// tested without a GPU. Invariants: operations on a stream run in order; streams run concurrently with each other and
// with the host, ordered only by events (decision D6); no call waits for the device unless its name begins so
// (synchronize). Errors: CudaError from the call itself, or from a later one on the same device for work that failed on
// it. Thread rule: a Stream is used by one thread at a time; everything else is free-threaded.
//
// [Note: capture] A CUDA graph can capture the operations of a stream: record, wait, copy (of device or page-locked
// memory), fill and kernels() neither wait nor allocate (run each once before, because CUDA loads kernels at first
// use). An event that a captured stream waits for must have been recorded in the same capture. Forbidden during the
// capture: done and synchronize of that stream or of such an event. make_*, allocate, share and open_* belong before
// the capture; queries, waits and allocations of other threads do not invalidate it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/stream_kernels.hpp"

namespace zcomm::device {

/// Names memory or an event of a device to the job's other processes on this host; plain bytes that may be sent.
struct SharedHandle {
  std::array<std::byte, 64> bytes{};
  std::uint64_t offset = 0;  ///< of the memory within the opened block
};

/// A driver packs smaller allocations into one block, and a handle names the block. With blocks of its own, shared
/// memory exposes nothing else of the process, and no block is opened twice.
constexpr std::size_t in_shared_blocks(std::size_t nbytes) {
  constexpr std::size_t kBlock = std::size_t{2} << 20;
  return (nbytes + kBlock - 1) / kBlock * kBlock;
}

/// A point in a stream. An event that was never recorded is done.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() = 0;
  virtual void synchronize() = 0;  ///< blocks (no spinning) until the stream has passed the point
  /// Blocks until then, or for about `patience_s`; returns whether the point was passed. For waits with a deadline.
  virtual bool wait_for(double patience_s) = 0;
  /// For Device::open_event; only of events made with `shared`.
  virtual SharedHandle handle() = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual void record(Event& event) = 0;  ///< sets the event's point to the present end of the stream
  virtual void wait(Event& event) = 0;    ///< orders later work after the event's present point
  virtual void copy(void* dst, const void* src, std::size_t nbytes) = 0;  ///< in any direction; no overlap
  virtual void fill(void* dst, std::uint8_t value, std::size_t nbytes) = 0;
  virtual StreamKernels& kernels() = 0;
  virtual bool done() = 0;
  virtual void synchronize() = 0;
  virtual std::uintptr_t native() const = 0;  ///< cudaStream_t; 0 if there is none
  /// Whether operations have run when their call returns, because the stream is the calling thread, not a queue.
  virtual bool is_host() const { return false; }
};

struct MemoryInfo {
  std::size_t free_nbytes, total_nbytes;
};

/// Device memory that is freed when the last owner drops it; 256-byte aligned.
using Memory = std::shared_ptr<void>;

class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& name() const = 0;  ///< "cuda:0", "simulated"
  /// Of the GPU or MIG instance, in hex, equal in all processes of this host; the simulated device's name.
  virtual std::string uuid() const = 0;

  /// `urgent`: scheduled before other streams, if the device has priorities.
  virtual std::unique_ptr<Stream> make_stream(bool urgent = false) = 0;
  /// The caller's own stream (torch's current one) by its native handle; it must outlive the result. On the simulated
  /// device, 0 is the host itself: operations have run when their call returns, and wait blocks.
  virtual std::unique_ptr<Stream> adopt_stream(std::uintptr_t native) = 0;
  virtual std::unique_ptr<Event> make_event(bool shared = false) = 0;

  virtual Memory allocate(std::size_t nbytes) = 0;  ///< throws CudaError naming the free bytes
  virtual MemoryInfo memory() = 0;
  /// Takes memory from allocate(), or an address within it.
  virtual SharedHandle share(const void* data) = 0;
  /// Another process's memory (or another rank's of this process, on the simulated device); closed by the last owner.
  virtual Memory open_memory(const SharedHandle& handle) = 0;
  virtual std::unique_ptr<Event> open_event(const SharedHandle& handle) = 0;

  /// For CurrentDevice: from push to pop the device is the calling thread's. Calls nest. Throws CudaError.
  virtual void push_current() = 0;
  virtual void pop_current() noexcept = 0;

  /// Tests only: the `n`-th stream operation from now (n >= 1) finds the device lost, as after an Xid error: it and
  /// each later call throw CudaError, and operations that have not run by then never run. 0: no fault, and a CUDA
  /// device recovers (a simulated one stays lost). For CUDA: affects all Device objects of this GPU in the process.
  virtual void lose_after(std::uint64_t n) = 0;
};

/// While it lives, `device` is the calling thread's: for libraries that use the current device (NCCL). Throws
/// CudaError.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device& device) : device_(device) { device_.push_current(); }
  ~CurrentDevice() { device_.pop_current(); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  Device& device_;
};

/// CUDA device `index`. Throws CudaError ("no CUDA device ...") without driver or device, InvalidArgument for an
/// unknown index, Unsupported in a build without CUDA.
std::shared_ptr<Device> make_cuda_device(int index);

}  // namespace zcomm::device
