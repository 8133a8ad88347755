// Staged path: collectives on private memory through staging slots that stay in the last-level cache.
//
// Runs the lists of coll/staged_plan.hpp: copy_in(c) | reduce(c-1) | copy_out(c-2), with a counter per stage that peers
// wait for. Invariants: slots are filled and freed by turns (SlotRing). Each element is reduced once, in rank order, by
// its owner, so the bits equal the direct path's. Buffers that are only read are not changed. Thread rule: as
// Engine::run.
#pragma once

#include <cstdint>
#include <vector>

#include "coll/shm/adaptive_store.hpp"
#include "coll/shm/liveness.hpp"
#include "coll/shm/slot_ring.hpp"
#include "coll/staged_plan.hpp"
#include "device/kernels.hpp"

namespace zcomm::coll {

class StagedPath {
 public:
  StagedPath(const HostMemory& memory, Liveness& liveness, SlotRing& slot_ring);
  /// All but all_to_all (StagedAllToAll).
  void run(const Operation& operation);

 private:
  void copy_in(const StagedPlan::Stage& stage, std::uint32_t index);
  void reduce(const StagedPlan::Stage& stage, std::uint32_t index);
  void copy_out(const StagedPlan::Stage& stage, std::uint32_t index);
  void reduce(const Action& action, std::uint32_t index);
  void reduce_past_cache(void* result, void* slot, std::size_t count);
  void copy_own(const Action& action);

  const std::byte* input(const Action& action) const { return items_[action.buffer].in + action.in * element_nbytes_; }
  std::byte* output(const Action& action, std::size_t element_nbytes) const {
    return items_[action.buffer].out + action.out * element_nbytes;
  }

  const HostMemory& memory_;
  Liveness& liveness_;
  SlotRing& slot_ring_;
  const int rank_, world_size_;
  StagedPlan plan_;
  AdaptiveStore writer_;
  std::vector<const void*> sources_;

  const Signature* signature_ = nullptr;  // of the running operation
  std::span<const Item> items_;
  std::size_t element_nbytes_ = 0, out_nbytes_ = 0;
  device::Stores out_stores_{};
};

}  // namespace zcomm::coll
