// Entrance: how the ranks of one host enter an operation together, and see that it is the same one (decision D5).
//
// [Note: entry] A rank writes its header and its Entry, publishes the operation's number in it, and goes on once all
// have arrived: then inputs are ready to be read, outputs may be written, and small operations have all data. Ranks
// compare the identities in the entries; only if they differ do they read headers. Every rank sees the same, so a
// mismatch is the same error everywhere without another word. Thread rule: as Engine::run.
#pragma once

#include <cstdint>

#include "coll/shm/liveness.hpp"

namespace zcomm::coll {

class Entrance {
 public:
  Entrance(const HostMemory& memory, Watch& watch) : memory_(memory), watch_(watch) {}

  /// Blocks until all ranks have entered. `bring(number)` puts data beside this rank's arrival. Throws
  /// CollectiveMismatch, and what Watch throws.
  template <class Bring>
  void enter(Header& header, const Bring& bring) {
    header.sequence = sequence_ + 1;
    watch_.begin(header);
    ++sequence_;
    ControlBlock& own = memory_.own();
    Entry& mine = own.entries[sequence_ & 1];
    if (guard_enabled) copy_header(own.headers[sequence_ & 1], header);
    mine.identity = header.identity;
    mine.place_in = header.place_in;
    mine.place_out = header.place_out;
    bring(sequence_);
    publish(mine, sequence_);
    watch_.wait_for_peers(Stage::arrived, sequence_);
    if (!guard_enabled) return;
    bool same = true;
    for (int rank = 0; rank < memory_.world_size(); ++rank) same &= entry(rank).identity == header.identity;
    if (!same) require_same(memory_.world_size(), [this](int rank) -> const Header& { return this->header(rank); });
  }
  void enter(Header& header) {
    enter(header, [](std::uint32_t) {});
  }

  /// Of the operation that was entered last.
  std::uint32_t number() const { return sequence_; }
  const Entry& entry(int rank) const { return memory_.block(rank).entries[sequence_ & 1]; }
  const Header& header(int rank) const { return memory_.block(rank).headers[sequence_ & 1]; }

 private:
  const HostMemory& memory_;
  Watch& watch_;
  std::uint32_t sequence_ = 0;
};

}  // namespace zcomm::coll
