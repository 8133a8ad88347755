// PeerCopyPath: gather, scatter and all_to_all directly into or out of a peer's symmetric memory, at offsets that the
// peer publishes.
//
// The direct path needs all buffers at the same offset on every rank; this path needs only one side symmetric (the
// root's, or one side of all_to_all), anywhere in any allocation. Two steps of the slots precede the copies: the ranks
// that own the memory publish its offsets, then all ranks publish whether they can reach it. [Note: pinned] Another
// rank may have dropped its part of the allocation, which it does not need for this call, or may drop it right now. So
// ranks hold the allocation while they copy, and a rank that no longer has it votes no: then all ranks use the slots.
// Invariants: only signatures decide whether to try. Thread rule: as Engine::run.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "coll/shm/direct.hpp"
#include "coll/shm/slot_ring.hpp"

namespace zcomm::coll {

/// pull or push, if the signatures of all ranks let PeerCopyPath try; staged for data that moves faster through a slot.
Path choose_peer_copy_path(const Signature& own, int world_size, std::size_t slot_nbytes,
                           const SignatureOf& signature_of);

class PeerCopyPath {
 public:
  PeerCopyPath(const HostMemory& memory, Liveness& liveness, SlotRing& slot_ring, const SymmetricMemory& symmetric);
  /// False, before anything moves, if some rank cannot reach memory that it needs. `path`: pull or push.
  bool run(const Operation& operation, Path path);

 private:
  /// The location of a buffer; id 0: it is empty.
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
  std::vector<std::byte*> remote_;  // by item: the peer's buffer, as this process maps it
};

}  // namespace zcomm::coll
