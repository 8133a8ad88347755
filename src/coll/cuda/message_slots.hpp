// MessageSlots: small pieces of device memory, allocated once. Thread rule: free-threaded.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/device.hpp"

namespace zcomm::coll {

class MessageSlots : public std::enable_shared_from_this<MessageSlots> {
 public:
  MessageSlots(std::shared_ptr<device::Device> device, std::size_t nbytes, std::size_t count)
      : device_(std::move(device)), nbytes_(nbytes), count_(count) {}

  /// A slot, which returns when its last owner drops it; null if none is free. Throws CudaError.
  device::Memory take() {
    const std::lock_guard lock(mutex_);
    if (!memory_) {
      memory_ = device_->allocate(nbytes_ * count_);
      for (std::size_t i = 0; i < count_; ++i) free_.push_back(static_cast<std::byte*>(memory_.get()) + i * nbytes_);
    }
    if (free_.empty()) return nullptr;
    std::byte* const slot = free_.back();
    free_.pop_back();
    return {slot, [self = shared_from_this()](void* used) { self->give_back(static_cast<std::byte*>(used)); }};
  }

 private:
  void give_back(std::byte* slot) {
    const std::lock_guard lock(mutex_);
    free_.push_back(slot);  // has room: it was there before
  }

  const std::shared_ptr<device::Device> device_;
  const std::size_t nbytes_, count_;
  std::mutex mutex_;
  device::Memory memory_;
  std::vector<std::byte*> free_;
};

}  // namespace zcomm::coll
