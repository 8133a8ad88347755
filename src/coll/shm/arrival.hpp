// Arrival: how the ranks of one host enter an operation together, and see that it is the same one (decision D5).
//
// [Note: entry] A rank writes its signature and its Entry, publishes the operation's number in it, and continues once
// all have arrived: then inputs may be read, outputs may be written, and small operations have all data. Ranks compare
// the identities in the entries; only if these differ do they read signatures. Every rank sees the same values, so all
// raise the same mismatch without further messages. Thread rule: as Engine::run.
#pragma once

#include <cstdint>

#include "coll/shm/liveness.hpp"

namespace zcomm::coll {

class Arrival {
 public:
  Arrival(const HostMemory& memory, Liveness& liveness) : memory_(memory), liveness_(liveness) {}

  /// Blocks until all ranks have entered. `bring(number)` stores data next to this rank's arrival. Throws
  /// CollectiveMismatch, and the errors of Liveness.
  template <class Bring>
  void enter(Signature& signature, const Bring& bring) {
    signature.sequence = sequence_ + 1;
    liveness_.begin(signature);
    ++sequence_;
    ControlBlock& own = memory_.own();
    Entry& mine = own.entries[sequence_ & 1];
    if (guard_enabled) copy_signature(own.signatures[sequence_ & 1], signature);
    mine.identity = signature.identity;
    mine.place_in = signature.place_in;
    mine.place_out = signature.place_out;
    bring(sequence_);
    publish(mine, sequence_);
    liveness_.wait_for_peers(Stage::arrived, sequence_);
    if (!guard_enabled) return;
    bool same = true;
    for (int rank = 0; rank < memory_.world_size(); ++rank) same &= entry(rank).identity == signature.identity;
    if (!same)
      require_same(memory_.world_size(), [this](int rank) -> const Signature& { return this->signature(rank); });
  }
  void enter(Signature& signature) {
    enter(signature, [](std::uint32_t) {});
  }

  /// Of the operation that was entered last.
  std::uint32_t number() const { return sequence_; }
  const Entry& entry(int rank) const { return memory_.block(rank).entries[sequence_ & 1]; }
  const Signature& signature(int rank) const { return memory_.block(rank).signatures[sequence_ & 1]; }

 private:
  const HostMemory& memory_;
  Liveness& liveness_;
  std::uint32_t sequence_ = 0;
};

}  // namespace zcomm::coll
