// DeviceStaged: collectives on private device memory, through staging slots that all ranks have open.
//
// Runs the lists of coll/staged_plan.hpp, in phases on one stream with a round after each: copy in step t, reduce step
// t - 1, copy out step t - 2 (t - 1 if nothing is reduced). [Note: slots in turn] Step t uses slot t % 4. A phase reads
// only peers' data that an earlier phase wrote, that is, before a round. A slot is filled again in phase t + 4; its
// last reader was in phase t + 2. The last round comes after the last phase, so no peer touches this rank's memory any
// more, and the next operation begins with slot 0.
// Invariants: a rank's own part does not pass through its slot on the way in; each element is reduced once, in rank
// order: the bits are the host's. Thread rule: as Engine::run.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "coll/cuda/ipc_rounds.hpp"
#include "coll/operation.hpp"
#include "coll/staged_plan.hpp"

namespace zcomm::coll {

/// The staging slots of all ranks.
class DeviceSlots {
 public:
  static constexpr std::uint32_t kCount = 4;
  DeviceSlots(device::Device& device, const HostMemory& memory, std::size_t slot_nbytes);

  device::SharedHandle handle() const { return device_.share(memory_[rank_].get()); }
  void open(int rank, const device::SharedHandle& handle) {
    memory_[static_cast<std::size_t>(rank)] = device_.open_memory(handle);
  }
  std::byte* slot(int rank, std::uint32_t step) const {
    return static_cast<std::byte*>(memory_[static_cast<std::size_t>(rank)].get()) + step % kCount * slot_nbytes_;
  }
  std::size_t slot_nbytes() const { return slot_nbytes_; }
  std::size_t nbytes() const { return memory_[rank_] ? device::in_shared_blocks(kCount * slot_nbytes_) : 0; }
  void close_peers() noexcept;
  device::Memory own() const { return memory_[rank_]; }

 private:
  device::Device& device_;
  const std::size_t rank_, slot_nbytes_;
  std::vector<device::Memory> memory_;  // by rank
};

class DeviceStaged {
 public:
  /// remote: the number of ranks on another device.
  DeviceStaged(const HostMemory& memory, DeviceRounds& rounds, const DeviceSlots& slots, int remote);
  /// All but all_to_all. Ends with a round.
  void run(const Operation& operation);
  /// all_to_all; its counts have been compared.
  void exchange(const Operation& operation, const SignatureOf& signature_of);

 private:
  void run(const StagedPlan::Stage& stage);
  void reduce(const Action& action, std::uint32_t step);
  void copy(std::byte* to, const std::byte* from, std::size_t nbytes);

  const HostMemory& memory_;
  DeviceRounds& rounds_;
  const DeviceSlots& slots_;
  const int rank_, world_size_, remote_;
  std::vector<const void*> sources_;
  StagedPlan plan_;
  std::vector<std::uint64_t> table_, begins_;

  const Signature* signature_ = nullptr;  // of the running operation
  std::span<const Item> items_;
  std::size_t element_nbytes_ = 0, out_nbytes_ = 0;
};

}  // namespace zcomm::coll
