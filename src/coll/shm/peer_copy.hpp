// PeerCopyPath: gather, scatter and all_to_all straight into or out of a peer's symmetric memory, at offsets that the
// peer shows.
//
// The direct path needs all buffers at the same offset on every rank; here one side suffices (the root's, or one side
// of all_to_all), and it may lie anywhere in any allocation. Two steps of the slots precede the copies: the ranks that
// own the memory show where it lies, then all ranks show whether they can reach it. [Note: pinned] Another rank may
// have dropped its part of the allocation, which it does not need for this call, or may drop it right now. So ranks
// hold the allocation while they copy, and one that has not got it any more votes no: then all ranks use the slots.
// Invariants: whether to try is decided by signatures alone. Thread rule: as Engine::run.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "coll/shm/direct.hpp"
#include "coll/shm/slot_ring.hpp"

namespace zcomm::coll {

/// pull or push, where the signatures of all ranks let PeerCopyPath try; staged for what goes faster through a slot.
Path choose_peer_copy_path(const Signature& own, int world_size, std::size_t slot_nbytes,
                           const SignatureOf& signature_of);

class PeerCopyPath {
 public:
  PeerCopyPath(const HostMemory& memory, Liveness& liveness, SlotRing& slot_ring, const SymmetricMemory& symmetric);
  /// False, and nothing has moved, if some rank cannot reach what it must. `path`: pull or push.
  bool run(const Operation& operation, Path path);

 private:
  /// Where a buffer lies; id 0: it is empty.
  struct HeapOffset {
    std::uint64_t id = 0, offset = 0;
  };
  static HeapOffset offset_of_buffer(const Allocation* home, const void* data);

  void show_offsets(const Operation& operation, Path path);
  bool reach(const Operation& operation, Path path);
  bool reach_one(std::size_t index, int peer, std::size_t offset_index);
  bool all_reach(bool reached);
  void copy(const Operation& operation, Path path);
  void exchange(const Operation& operation, Path path);
  void finish(const Operation& operation);

  const HostMemory& memory_;
  Liveness& liveness_;
  SlotRing& slot_ring_;
  const SymmetricMemory& symmetric_;
  const int rank_, world_size_;
  std::vector<std::shared_ptr<const Allocation>> pinned_;
  std::vector<std::byte*> remote_;  // by item: what was shown, as this process maps it
};

}  // namespace zcomm::coll
