// Runner: queues optimizer steps on a stream, with memory that it addresses as the host does.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "device/cuda/cuda.hpp"
#include "device/device.hpp"
#include "optim/stream_optim.hpp"

namespace zcomm::test {

/// Page-locked blocks by size, kept until the program ends: to lock one costs more than a small step.
class LockedBlocks {
 public:
  static void* take(std::size_t nbytes) {
    {
      const std::lock_guard lock(mutex());
      auto& free = free_by_nbytes()[nbytes];
      if (!free.empty()) {
        void* data = free.back();
        free.pop_back();
        return data;
      }
    }
    void* data = ::operator new(nbytes, std::align_val_t{4096});
    device::cuda::page_lock(data, nbytes);
    return data;
  }
  static void give(void* data, std::size_t nbytes) {
    const std::lock_guard lock(mutex());
    free_by_nbytes()[nbytes].push_back(data);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex& one = *new std::mutex;
    return one;
  }
  static std::map<std::size_t, std::vector<void*>>& free_by_nbytes() {
    static auto& all = *new std::map<std::size_t, std::vector<void*>>;
    return all;
  }
};

/// Whole page-locked pages on machines with a GPU; on others exactly the requested bytes, so that an overrun is found.
template <class T>
struct LockedAllocator {
  using value_type = T;
  LockedAllocator() = default;
  template <class U>
  LockedAllocator(const LockedAllocator<U>&) {}

  static constexpr std::align_val_t kPage{4096};
  static std::size_t pages(std::size_t n) { return (n * sizeof(T) / 4096 + 1) * 4096; }
  T* allocate(std::size_t n) {
    void* data = device::cuda::available() ? LockedBlocks::take(pages(n)) : ::operator new(n * sizeof(T), kPage);
    return static_cast<T*>(data);
  }
  void deallocate(T* data, std::size_t n) {
    if (device::cuda::available()) {
      LockedBlocks::give(data, pages(n));
    } else {
      ::operator delete(data, kPage);
    }
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
  virtual void step(const OptimShard& shard, const SgdParams& params) = 0;
  virtual void step(const OptimShard& shard, const AdagradParams& params) = 0;
  virtual void step(const OptimShard& shard, const optim::OnDevice<optim::AdamFactors>* told) = 0;
  virtual void step(const OptimShard& shard, const optim::OnDevice<optim::LionFactors>* told) = 0;
  virtual void adam(std::span<const optim::StreamAdamItem> items, const optim::StreamAdam& options,
                    optim::OnDevice<optim::AdamFactors>* factors) = 0;
  virtual void squares(double* sums, const void* grad, DType dtype, std::size_t count) = 0;
  virtual void norm(std::int64_t* words, const void* grad, DType dtype, std::size_t count) = 0;
  virtual void synchronize() {}
};

/// The emulation of CUDA's kernels, a simulated device, a GPU if there is one; made once.
const std::vector<std::unique_ptr<Runner>>& runners();

}  // namespace zcomm::test
