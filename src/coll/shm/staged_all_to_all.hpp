// Staged all_to_all: each rank streams its parts through its own slots, packed (see SplitStream).
//
// One pipeline for any counts: as many steps as the longest stream of all ranks takes, known from the signatures. A
// receiver finds its part by the table at the stream's beginning, and reads it from the slot of each step. Invariants:
// as SlotRing's; counts have been compared. Thread rule: as Engine::run.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "coll/shm/adaptive_store.hpp"
#include "coll/shm/slot_ring.hpp"
#include "coll/split_counts.hpp"
#include "device/kernels.hpp"

namespace zcomm::coll {

class StagedAllToAll {
 public:
  StagedAllToAll(const HostMemory& memory, SlotRing& slot_ring);
  /// The check: throws CollectiveMismatch, the same on every rank, unless all splits match.
  void compare(const Operation& operation, const SignatureOf& signature_of);
  void run(const Operation& operation, const SignatureOf& signature_of);

 private:
  void copy_in(const SplitStream& stream, std::uint32_t step);
  void copy_out(std::uint32_t step);

  const HostMemory& memory_;
  SlotRing& slot_ring_;
  const int rank_, world_size_;
  AdaptiveStore writer_;
  std::vector<std::uint64_t> begins_;  // by sender: offset of this rank's part in its stream
  std::span<const Item> items_;        // of the running operation
  std::size_t element_nbytes_ = 0, own_nbytes_ = 0;
  device::Stores out_stores_{};
};

}  // namespace zcomm::coll
