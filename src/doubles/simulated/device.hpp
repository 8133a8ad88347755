// The simulated device: streams are threads, memory is the host's, delays are random. For tests.
//
// Handles are valid only within this process: ranks that are threads share memory and events, processes do not. Memory
// initially holds 0xff bytes (NaN), so that reads of unwritten memory show.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/device.hpp"

namespace zcomm::device {

struct SimulatedOptions {
  std::uint64_t seed = 0;
  double max_delay_s = 0.0;       ///< the longest delay of a stream's operation before it runs (by seed)
  std::size_t memory_nbytes = 0;  ///< limit of live allocations; 0: the host's memory
  std::string name = "simulated";
  bool dry_run = false;  ///< operations keep delays and order, but touch no memory: for traces with races
};
std::shared_ptr<Device> make_simulated_device(const SimulatedOptions& options = {});

}  // namespace zcomm::device
