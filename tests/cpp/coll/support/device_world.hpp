// Worlds of ranks with simulated devices: each rank a thread, each with a device of its own or all with one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "coll/cuda/ipc_engine.hpp"
#include "coll/support/comm_world.hpp"
#include "doubles/recorded/trace.hpp"
#include "doubles/simulated/device.hpp"

namespace zcomm::test {

/// A borrowed stream: another library owns it, as torch owns its own.
class BorrowedStream : public device::Stream {
 public:
  explicit BorrowedStream(device::Stream& inner) : inner_(inner) {}
  void record(device::Event& event) override { inner_.record(event); }
  void wait(device::Event& event) override { inner_.wait(event); }
  void copy(void* dst, const void* src, std::size_t nbytes) override { inner_.copy(dst, src, nbytes); }
  void fill(void* dst, std::uint8_t value, std::size_t nbytes) override { inner_.fill(dst, value, nbytes); }
  device::StreamKernels& kernels() override { return inner_.kernels(); }
  bool done() override { return inner_.done(); }
  void synchronize() override { inner_.synchronize(); }
  std::uintptr_t native() const override { return reinterpret_cast<std::uintptr_t>(&inner_); }
  bool is_host() const override { return inner_.is_host(); }

 private:
  device::Stream& inner_;
};

/// A device on which the address of a Stream is its native handle.
class LendingDevice : public device::Device {
 public:
  explicit LendingDevice(std::shared_ptr<device::Device> inner) : inner_(std::move(inner)) {}
  const std::string& name() const override { return inner_->name(); }
  std::string uuid() const override { return inner_->uuid(); }
  std::unique_ptr<device::Stream> make_stream(bool urgent) override { return inner_->make_stream(urgent); }
  std::unique_ptr<device::Stream> adopt_stream(std::uintptr_t native) override {
    if (native == 0) return inner_->adopt_stream(0);
    return std::make_unique<BorrowedStream>(*reinterpret_cast<device::Stream*>(native));
  }
  std::unique_ptr<device::Event> make_event(bool shared) override { return inner_->make_event(shared); }
  device::Memory allocate(std::size_t nbytes) override { return inner_->allocate(nbytes); }
  device::MemoryInfo memory() override { return inner_->memory(); }
  device::SharedHandle share(const void* data) override { return inner_->share(data); }
  device::Memory open_memory(const device::SharedHandle& handle) override { return inner_->open_memory(handle); }
  std::unique_ptr<device::Event> open_event(const device::SharedHandle& handle) override {
    return inner_->open_event(handle);
  }
  void push_current() override { inner_->push_current(); }
  void pop_current() noexcept override { inner_->pop_current(); }
  void lose_after(std::uint64_t n) override { inner_->lose_after(n); }

 private:
  const std::shared_ptr<device::Device> inner_;
};

struct DeviceOptions {
  double timeout_s = 30;
  std::size_t slot_nbytes = 4096;  ///< small, so that modest buffers take many steps
  double max_delay_s = 0;
  bool one_device = false;                         ///< all ranks have the same
  std::size_t memory_nbytes = 0;                   ///< of each device
  std::shared_ptr<device::Trace> trace = nullptr;  ///< records the devices' operations
  std::function<std::shared_ptr<device::Device>(std::shared_ptr<device::Device>)> wrap = nullptr;  ///< each device
};

struct DeviceRank : Rank {
  std::shared_ptr<device::Device> device;
};

inline std::uintptr_t handle_of(device::Stream& stream) { return reinterpret_cast<std::uintptr_t>(&stream); }

/// As run_world(); `comm` is over devices.
inline void run_device_world(int world, const DeviceOptions& options, const std::function<void(DeviceRank&)>& body) {
  Listeners listeners(world);
  const auto make = [&](int r) {
    auto device = device::make_simulated_device({.seed = static_cast<std::uint64_t>(r) + 1,
                                                 .max_delay_s = options.max_delay_s,
                                                 .memory_nbytes = options.memory_nbytes,
                                                 .name = "simulated:" + std::to_string(r)});
    if (options.trace) device = device::record_device(std::move(device), options.trace);
    if (options.wrap) device = options.wrap(std::move(device));
    return std::make_shared<LendingDevice>(std::move(device));
  };
  const std::shared_ptr<device::Device> common = make(0);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      try {
        DeviceRank self{};
        self.rank = r, self.world = world;
        self.mesh = join(listeners, r);
        self.device = options.one_device ? common : make(r);
        self.comm = coll::make_cuda_ipc_communicator(self.mesh, self.device, {options.timeout_s, options.slot_nbytes});
        body(self);
        if (self.comm) self.comm->close();
        self.mesh->leave();
      } catch (const std::exception& error) {
        fail(__FILE__, __LINE__, "rank " + std::to_string(r) + " of " + std::to_string(world) + ": " + error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace zcomm::test
