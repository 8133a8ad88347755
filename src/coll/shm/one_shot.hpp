// One-shot path: small operations, with data that travels in the entry.
//
// Each rank writes its input next to its arrival: into the entry's own cache-line pair if it fits, else into its
// mailbox. A rank that has seen all others arrive has all inputs, and computes its own results in rank order: one
// barrier, no other exchange, and the bits of the other paths (an element is summed by several ranks, each in the same
// way). Invariants: only values that all ranks have compared decide whether an operation takes this path; mailbox n % 2
// is written again by operation n + 2, which no rank enters before all have finished n. Thread rule: as Engine::run.
#pragma once

#include <cstdint>
#include <vector>

#include "coll/operation.hpp"
#include "coll/shm/control_block.hpp"

namespace zcomm::coll {

class OneShotPath {
 public:
  explicit OneShotPath(const HostMemory& memory, std::size_t limit_nbytes);

  /// Whether `operation` is small enough, on this rank and on every rank with the same call.
  bool takes(const Operation& operation) const;
  /// Before this rank enters operation `sequence`.
  void bring(const Operation& operation, std::uint32_t sequence);
  /// After all have entered.
  void finish(const Operation& operation);

 private:
  std::byte* room(int rank, std::uint32_t sequence, std::size_t nbytes) const;
  void reduce(const Operation& operation, const Item& item, std::size_t offset, std::size_t begin, std::size_t count);
  void collect(const Operation& operation, const Item& item, std::size_t offset);

  const HostMemory& memory_;
  const int rank_, world_size_;
  const std::size_t limit_nbytes_;
  std::vector<std::byte*> rooms_;  // of the running operation, by rank
  std::vector<const void*> sources_;
};

}  // namespace zcomm::coll
