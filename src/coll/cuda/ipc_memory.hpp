// DeviceHeap: symmetric memory on devices: each rank's own, opened by all others (decision D1).
//
// [Note: owner of memory] A rank may free memory only when no other has it open, and close a peer's memory only when
// its own stream has passed the last operation that read it. So a dropped tensor is kept until the ranks allocate next:
// then each closes its mappings of the peers' memory, reports it, and frees its own part once all ranks have reported
// theirs closed. The engine's end does the same for the rest. Thread rule: make() as Engine::run; dropping buffers is
// free-threaded.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "coll/cuda/ipc_rounds.hpp"
#include "coll/cuda/ticket.hpp"
#include "coll/operation.hpp"
#include "coll/symmetric_memory.hpp"

namespace zcomm::coll {

class DeviceHeap {
 public:
  DeviceHeap(std::shared_ptr<DeviceLiveness> waits, const HostMemory& memory, DeviceRounds& rounds,
             SymmetricMemory& symmetric);
  ~DeviceHeap();

  /// Collective. Memory that a rank was refused is every rank's CudaError in `operation.allocate`, and breaks nothing.
  void make(const Operation& operation);
  /// At the end, once the stream has passed: closes the peers' parts of dropped buffers, so that the peers may free
  /// them.
  void close_peers() noexcept;
  /// Memory that other ranks may still have open is left to the process (see CudaIpcEngine's end).
  void abandon() noexcept;

 private:
  struct Buffer;
  struct Dropped;
  void share_drops(const Signature& during);
  void forget(const std::vector<std::uint64_t>& ids);
  device::Memory zeroed(std::size_t nbytes, const Signature& during);

  const std::shared_ptr<DeviceLiveness> waits_;
  const HostMemory& memory_;
  DeviceRounds& rounds_;
  SymmetricMemory& symmetric_;
  std::unique_ptr<device::Event> passed_;  // by the engine's stream
  std::shared_ptr<Dropped> dropped_;
  std::map<std::uint64_t, int> drops_;  // how many ranks have dropped it
};

}  // namespace zcomm::coll
