// Rounds (coll/cuda/ipc_rounds.hpp).
#include "coll/cuda/ipc_rounds.hpp"

#include <cstring>

namespace zcomm::coll {

DeviceRounds::DeviceRounds(device::Device& device, const HostMemory& memory, Liveness& liveness)
    : device_(device),
      memory_(memory),
      liveness_(liveness),
      stream_(device.make_stream(/*urgent=*/true)),
      peers_(static_cast<std::size_t>(memory.world_size())) {
  const bool alone = memory.world_size() == 1;
  for (auto& event : own_) event = device.make_event(/*shared=*/!alone);
}

std::array<device::SharedHandle, 2> DeviceRounds::handles() { return {own_[0]->handle(), own_[1]->handle()}; }

void DeviceRounds::open(int rank, const std::array<device::SharedHandle, 2>& handles) {
  for (std::size_t i = 0; i < handles.size(); ++i)
    peers_[static_cast<std::size_t>(rank)][i] = device_.open_event(handles[i]);
}

void DeviceRounds::mark() {
  if (memory_.world_size() > 1) stream_->record(*own_[round_ & 1]);
}

void DeviceRounds::follow() {
  for (int rank = 0; rank < memory_.world_size(); ++rank)
    if (rank != memory_.rank()) stream_->wait(*peers_[static_cast<std::size_t>(rank)][round_ & 1]);
  ++round_;
}

void DeviceRounds::barrier_on_host() {
  publish(memory_.own()[Stage::done], ++barriers_);
  liveness_.wait_for_peers(Stage::done, barriers_);
}

void DeviceRounds::all_gather_on_host(const void* mine, std::size_t nbytes) {
  std::memcpy(memory_.slot(memory_.rank(), 0), mine, nbytes);
  barrier_on_host();
}

}  // namespace zcomm::coll
