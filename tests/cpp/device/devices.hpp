// The devices on which a test body runs: the simulated one, without and with delays, and the GPU if there is one.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "device/cuda/cuda.hpp"
#include "device/device.hpp"
#include "doubles/simulated/device.hpp"
#include "test.hpp"

namespace zcomm::test {

inline std::vector<std::shared_ptr<device::Device>> devices() {
  std::vector<std::shared_ptr<device::Device>> all = {device::make_simulated_device({}),
                                                      device::make_simulated_device({.seed = 7, .max_delay_s = 5e-4})};
  if (device::cuda::available()) all.push_back(device::make_cuda_device(0));
  return all;
}

/// Runs `body` on each; an exception fails the test and names the device.
inline void on_devices(const std::function<void(device::Device&)>& body) {
  for (const auto& each : devices()) {
    try {
      body(*each);
    } catch (const std::exception& error) {
      fail(__FILE__, __LINE__, each->name() + ": " + error.what());
    }
  }
}

/// Device memory as the host reads and writes it, a copy at a time.
template <class T>
class OnDevice {
 public:
  OnDevice(device::Device& device, std::size_t count)
      : count_(count), stream_(device.make_stream()), memory_(device.allocate(count * sizeof(T))) {}
  OnDevice(device::Device& device, const std::vector<T>& values) : OnDevice(device, values.size()) { put(values); }

  T* data() { return static_cast<T*>(memory_.get()); }
  void put(const std::vector<T>& values) {
    stream_->copy(data(), values.data(), values.size() * sizeof(T));
    stream_->synchronize();
  }
  std::vector<T> get() {
    std::vector<T> values(count_);
    stream_->copy(values.data(), data(), count_ * sizeof(T));
    stream_->synchronize();
    return values;
  }

 private:
  std::size_t count_;
  std::unique_ptr<device::Stream> stream_;
  device::Memory memory_;
};

}  // namespace zcomm::test
