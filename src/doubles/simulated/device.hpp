// The simulated device: streams are threads, memory is the host's, delays are random. For tests.
//
// Handles reach as far as this process: ranks that are threads share memory and events, processes do not.
// Memory holds 0xff bytes (NaN) at first, so that what was never written shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/device.hpp"

namespace zcomm::device {

struct SimulatedOptions {
  std::uint64_t seed = 0;
  double max_delay_s = 0.0;       ///< each operation of a stream waits for up to this long before it runs (by seed)
  std::size_t memory_nbytes = 0;  ///< what allocate() may hand out at a time; 0: what the host has
  std::string name = "simulated";
  bool dry_run = false;  ///< operations take their time and their order, but touch no memory: for traces with races
};
std::shared_ptr<Device> make_simulated_device(const SimulatedOptions& options = {});

}  // namespace zcomm::device
