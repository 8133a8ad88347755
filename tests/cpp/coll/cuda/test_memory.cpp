// Backend cuda_ipc on simulated devices: no rank frees device memory that another one still has open.
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "coll/support/device_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

/// Counts the openings of each allocation, over all ranks of a world.
class Openings {
 public:
  void open(const void* data) {
    const std::lock_guard lock(mutex_);
    ++count_[data];
    ++total;
  }
  void close(const void* data) {
    const std::lock_guard lock(mutex_);
    --count_[data];
  }
  void freed(const void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = count_.find(data);
    if (found == count_.end()) return;
    if (found->second > 0) ++too_early;
    count_.erase(found);
  }
  std::atomic<int> total{0}, too_early{0};

 private:
  std::mutex mutex_;
  std::map<const void*, int> count_;
};

/// Reports its operations to Openings, and is slow to close memory opened of others.
class SlowToClose : public LendingDevice {
 public:
  SlowToClose(std::shared_ptr<device::Device> inner, Openings& openings)
      : LendingDevice(std::move(inner)), openings_(openings) {}
  device::Memory allocate(std::size_t nbytes) override {
    device::Memory memory = LendingDevice::allocate(nbytes);
    void* const data = memory.get();
    return {data, [memory = std::move(memory), &all = openings_](void* at) mutable {
              all.freed(at);
              memory.reset();
            }};
  }
  device::Memory open_memory(const device::SharedHandle& handle) override {
    device::Memory memory = LendingDevice::open_memory(handle);
    void* const data = memory.get();
    openings_.open(data);
    return {data, [memory = std::move(memory), &all = openings_](void* at) mutable {
              std::this_thread::sleep_for(std::chrono::milliseconds(10));
              all.close(at);
              memory.reset();
            }};
  }

 private:
  Openings& openings_;
};

}  // namespace

TEST(cuda_ipc_memory, is_freed_when_nobody_has_it_open) {
  for (const bool one_more : {false, true}) {  // with it, the ranks meet again after some were dropped
    Openings openings;
    const auto wrap = [&](std::shared_ptr<device::Device> inner) {
      return std::make_shared<SlowToClose>(std::move(inner), openings);
    };
    run_device_world(3, {.wrap = wrap}, [&](DeviceRank& self) {
      self.comm->allocate(100);
      auto second = self.comm->allocate(100);
      second.reset();
      if (one_more) self.comm->allocate(100);
      if (self.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    });
    EXPECT_EQ(openings.total.load(), 6 * (one_more ? 4 : 3));  // the slots too
    EXPECT_EQ(openings.too_early.load(), 0);
  }
}
