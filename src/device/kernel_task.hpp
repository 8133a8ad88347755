// KernelTask: a kernel that a device does not know by name: the memory that it touches, and its two bodies.
//
// With it a higher layer adds kernels of its own (the optimizers' steps), and each device runs them: CUDA calls on_cuda
// at once with the stream, the simulated device copies the task and calls on_host in its turn, a recorder records the
// touched memory and passes the task on. Both bodies give the same bits (decision D3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace zcomm::device {

/// Memory that a task reads or writes.
struct Touched {
  const void* data;
  std::size_t nbytes;
  bool written;
};

class KernelTask {
 public:
  virtual ~KernelTask() = default;
  virtual const char* name() const = 0;
  virtual void touch(const std::function<void(const Touched&)>& each) const = 0;
  virtual void on_host() const = 0;
  /// stream: cudaStream_t, of the current device. Launches, without waiting; errors are left for cudaGetLastError.
  virtual void on_cuda(std::uintptr_t stream) const = 0;
  /// A copy that outlives the host memory that this one points to.
  virtual std::shared_ptr<const KernelTask> copy() const = 0;
};

}  // namespace zcomm::device
