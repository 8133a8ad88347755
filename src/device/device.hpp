// Device: an accelerator as the rest of the core sees it: memory, streams and events.
//
// Behind it stands CUDA (device/cuda; no_cuda.cpp there where that is missing), a simulated device (its streams are
// threads of this process, its memory is the host's; doubles/simulated), or a recorder round either of them that
// writes down which stream touched what in which order (doubles/recorded): the logic above is the same for all, and is
// tested without a GPU. Invariants: what is put on a stream runs in that order; streams run beside each other and
// beside the host, ordered by events alone (decision D6); no call waits for the device unless its name begins so
// (synchronize). Errors: CudaError from the call itself, or from a later one on the same device for work that failed on
// it. Thread rule: a Stream is used by one thread at a time; everything else is free-threaded.
//
// [Note: capture] A CUDA graph can capture what is put on a stream: record, wait, copy (of device or page-locked
// memory), fill and kernels() neither wait nor allocate (run each once before: kernels are loaded then). An event that
// a captured stream waits for must have been recorded in the same capture. Not while it is captured: done and
// synchronize of that stream or of such an event. make_*, allocate, share and open_* belong before the capture;
// queries, waits and allocations of other threads do not spoil it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/stream_kernels.hpp"

namespace zcomm::device {

/// Names memory or an event of a device to the job's other processes on this host; plain bytes, to be sent as they are.
struct SharedHandle {
  std::array<std::byte, 64> bytes{};
  std::uint64_t offset = 0;  ///< of memory within what the handle opens
};

/// A driver packs smaller allocations into one block, and a handle names the block: with blocks of its own nothing else
/// of the process is shared with it, and no block is opened twice.
constexpr std::size_t in_shared_blocks(std::size_t nbytes) {
  constexpr std::size_t kBlock = std::size_t{2} << 20;
  return (nbytes + kBlock - 1) / kBlock * kBlock;
}

/// A point in a stream. One that was never recorded is done.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() = 0;
  virtual void synchronize() = 0;  ///< blocks (no spinning) until the point has been passed
  /// Blocks until then, or for about `patience_s`; returns whether it has been passed. For waits with a deadline.
  virtual bool wait_for(double patience_s) = 0;
  /// For Device::open_event; only of events made with `shared`.
  virtual SharedHandle handle() = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual void record(
      Event& event) = 0;                ///< the event's point is from now on the end of what the stream has been given
  virtual void wait(Event& event) = 0;  ///< what comes next runs after the point that was recorded last, as of now
  virtual void copy(void* dst, const void* src, std::size_t nbytes) = 0;  ///< in any direction; no overlap
  virtual void fill(void* dst, std::uint8_t value, std::size_t nbytes) = 0;
  virtual StreamKernels& kernels() = 0;
  virtual bool done() = 0;
  virtual void synchronize() = 0;
  virtual std::uintptr_t native() const = 0;  ///< cudaStream_t; 0 where there is none
  /// What it is given has run when the call returns: it is the calling thread, not a queue.
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
  /// Of the GPU or MIG instance, in hex, alike in all processes of this host; the simulated device's name.
  virtual std::string uuid() const = 0;

  /// `urgent`: where the device knows priorities, before other streams.
  virtual std::unique_ptr<Stream> make_stream(bool urgent = false) = 0;
  /// The caller's own stream (torch's current one) by its native handle; it must outlive the result. On the simulated
  /// device, 0 is the host itself: what it is given has run when the call returns, and wait blocks.
  virtual std::unique_ptr<Stream> adopt_stream(std::uintptr_t native) = 0;
  virtual std::unique_ptr<Event> make_event(bool shared = false) = 0;

  virtual Memory allocate(std::size_t nbytes) = 0;  ///< throws CudaError that names what is free
  virtual MemoryInfo memory() = 0;
  /// Memory from allocate(), or within it.
  virtual SharedHandle share(const void* data) = 0;
  /// Another process's memory (or another rank's of this process, on the simulated device); closed by the last owner.
  virtual Memory open_memory(const SharedHandle& handle) = 0;
  virtual std::unique_ptr<Event> open_event(const SharedHandle& handle) = 0;

  /// CurrentDevice's: from push to pop the device is the calling thread's. Calls nest. Throws CudaError.
  virtual void push_current() = 0;
  virtual void pop_current() noexcept = 0;

  /// Tests only: the `n`-th operation from now (n >= 1) that is put on a stream finds the device lost, as after an Xid
  /// error: it and each later call throw CudaError, and what had not run by then never does. 0: no fault, and a CUDA
  /// device is as before (a simulated one stays lost). Of CUDA: for all Device objects of this GPU in the process.
  virtual void lose_after(std::uint64_t n) = 0;
};

/// While it lives, `device` is the calling thread's: for libraries that go by that (NCCL). Throws CudaError.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device& device) : device_(device) { device_.push_current(); }
  ~CurrentDevice() { device_.pop_current(); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  Device& device_;
};

/// CUDA device `index`. Throws CudaError ("no CUDA device ...") without driver or device, InvalidArgument for an index
/// that is not there, Unsupported in a build without CUDA.
std::shared_ptr<Device> make_cuda_device(int index);

}  // namespace zcomm::device
