// Staged path: collectives on private memory through staging slots that stay in the last-level cache.
//
// A software pipeline of three stages over steps (coll/steps.hpp): copy_in(c) | reduce(c-1) | copy_out(c-2).
// Invariants: slots are filled and freed by turns (SlotRing). A rank's own part never passes through its slot on the
// way in. Each element is reduced once, in rank order, by its owner: the bits are those of the direct path. Buffers
// that are only read stay as they are.
// Thread rule: as Engine::run.
#pragma once

#include <cstdint>
#include <vector>

#include "coll/shm/adaptive_store.hpp"
#include "coll/shm/liveness.hpp"
#include "coll/shm/slot_ring.hpp"
#include "coll/steps.hpp"
#include "device/kernels.hpp"

namespace zcomm::coll {

class StagedPath {
 public:
  StagedPath(const HostMemory& memory, Liveness& liveness, SlotRing& slot_ring);
  /// All but all_to_all (StagedAllToAll).
  void run(const Operation& operation);

 private:
  void copy_in(const Step& step, std::uint32_t index);
  void reduce(const Step& step, std::uint32_t index);
  void copy_out(const Step& step, std::uint32_t index);

  void bring(const Piece& piece, std::byte* slot);
  bool brings() const;
  bool takes() const;
  bool is_root() const { return signature_->root == rank_; }
  void reduce_piece(const Piece& piece, std::uint32_t index);
  void reduce_past_cache(void* result, void* slot, std::size_t count);
  void take(const Piece& piece, std::uint32_t index);

  const HostMemory& memory_;
  Liveness& liveness_;
  SlotRing& slot_ring_;
  const int rank_, world_size_;
  AdaptiveStore writer_;
  std::vector<const void*> sources_;
  Step steps_[3];  // in flight

  const Signature* signature_ = nullptr;  // of the running operation
  std::span<const Item> items_;
  std::size_t element_nbytes_ = 0, out_nbytes_ = 0;
  device::Stores out_stores_{};
};

/// Chunks of all_reduce begin at multiples of this many elements.
constexpr std::size_t kChunkAlign = 64;

}  // namespace zcomm::coll
