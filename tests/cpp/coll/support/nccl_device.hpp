// A simulated device for tests of backend nccl: its streams run functions, and it knows the rank of each thread.
//
// The native handle of each of its streams is the address of a device::Stream, which is how FakeNccl finds it, as
// LendingDevice does. Thread rule: device.hpp's; current() is of the calling thread.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "coll/support/device_world.hpp"
#include "device/kernel_task.hpp"

namespace zcomm::test {

/// Queues `function` on the stream. It may block: other streams continue.
inline void put(device::Stream& stream, std::function<void()> function) {
  class Task final : public device::KernelTask {
   public:
    explicit Task(std::function<void()> body) : body_(std::move(body)) {}
    const char* name() const override { return "function"; }
    void touch(const std::function<void(const device::Touched&)>&) const override {}
    void on_host() const override { body_(); }
    void on_cuda(std::uintptr_t) const override {}
    std::shared_ptr<const device::KernelTask> copy() const override { return std::make_shared<Task>(*this); }

   private:
    std::function<void()> body_;
  };
  stream.kernels().run(Task(std::move(function)));
}

class NcclDevice final : public LendingDevice {
 public:
  NcclDevice(int rank, std::shared_ptr<device::Device> inner) : LendingDevice(std::move(inner)), rank_(rank) {}

  int rank() const { return rank_; }
  std::unique_ptr<device::Stream> make_stream(bool urgent) override {
    return std::make_unique<NamedStream>(LendingDevice::make_stream(urgent));
  }
  void push_current() override { entered().push_back(this); }
  void pop_current() noexcept override { entered().pop_back(); }

  /// The calling thread's, or null.
  static const NcclDevice* current() { return entered().empty() ? nullptr : entered().back(); }

 private:
  class NamedStream final : public BorrowedStream {
   public:
    explicit NamedStream(std::unique_ptr<device::Stream> inner) : BorrowedStream(*inner), owner_(std::move(inner)) {}

   private:
    const std::unique_ptr<device::Stream> owner_;
  };
  static std::vector<const NcclDevice*>& entered() {
    static thread_local std::vector<const NcclDevice*> all;
    return all;
  }

  const int rank_;
};

}  // namespace zcomm::test
