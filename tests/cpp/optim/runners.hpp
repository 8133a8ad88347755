// Runner: what puts optimizer steps on a stream, and memory that it addresses as the host does.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "device/cuda.hpp"
#include "device/device.hpp"
#include "optim/stream_optim.hpp"

namespace zcomm::test {

/// Whole pages, page-locked where a GPU is.
template <class T>
struct LockedAllocator {
  using value_type = T;
  LockedAllocator() = default;
  template <class U>
  LockedAllocator(const LockedAllocator<U>&) {}

  static constexpr std::align_val_t kPage{4096};
  static std::size_t pages(std::size_t n) { return (n * sizeof(T) / 4096 + 1) * 4096; }
  T* allocate(std::size_t n) {
    void* data = ::operator new(device::cuda::available() ? pages(n) : n * sizeof(T), kPage);
    device::cuda::page_lock(data, pages(n));
    return static_cast<T*>(data);
  }
  void deallocate(T* data, std::size_t) {
    device::cuda::page_unlock(data);
    ::operator delete(data, kPage);
  }
  bool operator==(const LockedAllocator&) const { return true; }
};
template <class T>
using LockedVector = std::vector<T, LockedAllocator<T>>;
using LockedBytes = LockedVector<std::byte>;
using LockedFloats = LockedVector<float>;

template <class T>
class Locked {
 public:
  explicit Locked(const T& value) : memory_(1, value) {}
  const T* get() const { return memory_.data(); }

 private:
  LockedVector<T> memory_;
};

class Runner {
 public:
  virtual ~Runner() = default;
  virtual std::string name() const = 0;
  virtual void step(const OptimShard& shard, const AdamParams& params) = 0;
  virtual void step(const OptimShard& shard, const LionParams& params) = 0;
  virtual void step(const OptimShard& shard, const optim::OnDevice<optim::AdamFactors>* told) = 0;
  virtual void step(const OptimShard& shard, const optim::OnDevice<optim::LionFactors>* told) = 0;
  virtual void adam(std::span<const optim::StreamAdamItem> items, const optim::StreamAdam& options,
                    optim::OnDevice<optim::AdamFactors>* factors) = 0;
  virtual void squares(double* sums, const void* grad, DType dtype, std::size_t count) = 0;
  virtual void norm(std::int64_t* words, const void* grad, DType dtype, std::size_t count) = 0;
  virtual void synchronize() {}
};

/// The emulation of CUDA's kernels, a simulated device, a GPU where one is; made once.
const std::vector<std::unique_ptr<Runner>>& runners();

}  // namespace zcomm::test
