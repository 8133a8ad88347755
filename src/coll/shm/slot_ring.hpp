// SlotRing: the ranks' turns on the staging slots, over the whole life of a communicator.
//
// Each use of the slots is a step: a rank claims its slot, fills and shows it; peers see it and release the step.
// Invariants: step g uses slot g % slot_count; all ranks take the same number of steps in each operation; a slot is
// filled again only after every peer has released its step. Thread rule: as Engine::run.
#pragma once

#include <cstdint>

#include "coll/shm/liveness.hpp"

namespace zcomm::coll {

class SlotRing {
 public:
  SlotRing(const HostMemory& memory, Liveness& liveness) : memory_(memory), liveness_(liveness) {}

  /// Steps of all operations before this one: the index of its first.
  std::uint32_t base() const { return base_; }
  void advance(std::uint32_t steps) { base_ += steps; }

  /// Waits until no peer needs the contents of this rank's slot, and returns it.
  std::byte* claim(std::uint32_t index) {
    liveness_.wait_for_peers(Stage::copied_out, index + 1 - static_cast<std::uint32_t>(memory_.slot_count()));
    return memory_.slot(memory_.rank(), index);
  }
  /// Publishes this rank's slot of the step, which it may have left empty.
  void show(std::uint32_t index) { publish(memory_.own()[Stage::copied_in], index + 1); }
  /// A rank's slot, once it is filled.
  const std::byte* see(int rank, std::uint32_t index) {
    if (rank != memory_.rank()) liveness_.wait(Stage::copied_in, rank, index + 1);
    return memory_.slot(rank, index);
  }
  /// Ends this rank's reads of the step. For steps in which nothing is reduced.
  void release(std::uint32_t index) {
    publish(memory_.own()[Stage::reduced], index + 1);  // all advance, or it would look late after wrap-around
    publish(memory_.own()[Stage::copied_out], index + 1);
  }

 private:
  const HostMemory& memory_;
  Liveness& liveness_;
  std::uint32_t base_ = 0;
};

}  // namespace zcomm::coll
