// ControlBlock: what one rank shows to the others, and the host-wide memory that holds it.
//
// Each rank owns one segment: its ControlBlock, then its staging slots. All ranks map all segments.
// Invariants: a block is written by its rank alone, except `poison`, of which only rank 0's counts and which the first
// failure sets by compare-and-swap for good: so every rank reports the same first failure.
// Thread rule: counters as in counter.hpp; `failure` is written before and read after `poison`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "coll/counter.hpp"
#include "coll/header.hpp"
#include "heap/segment.hpp"
#include "net/mesh.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::coll {

/// What a rank has done: `arrived` and `done` count operations, the others staged steps over the whole life.
enum class Stage { arrived, copied_in, reduced, copied_out, done };
constexpr int kStageCount = 5;

struct ControlBlock {
  Counter counters[kStageCount];
  Header headers[2];  ///< of operation n in [n % 2]: n + 2 is not entered before all have read n
  alignas(128) std::atomic<std::uint32_t> closed{0};
  std::atomic<std::uint32_t> suspended{0};  ///< its deadline: see Communicator::suspend_deadline
  alignas(128) std::atomic<std::uint32_t> poison{0};
  char failure[1024] = {};  ///< this rank's message if `poison` names it as the one that noticed

  Counter& operator[](Stage stage) { return counters[static_cast<int>(stage)]; }
};

class HostMemory {
 public:
  /// Collective over `mesh`. Throws CollectiveMismatch if the options differ between ranks, InvalidArgument.
  HostMemory(net::Mesh& mesh, const CommOptions& options);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(segments_.size()); }
  ControlBlock& block(int rank) const;
  ControlBlock& own() const { return block(rank_); }
  std::byte* slot(int rank, std::uint32_t step) const;
  std::size_t slot_nbytes() const { return slot_nbytes_; }
  int slot_count() const { return slot_count_; }
  std::size_t nbytes() const { return segments_[static_cast<std::size_t>(rank_)].nbytes(); }

  /// Wakes every sleeper of every rank.
  void wake_all() const noexcept;

 private:
  int rank_;
  int slot_count_;
  std::size_t slot_nbytes_;
  std::vector<heap::Segment> segments_;
};

}  // namespace zcomm::coll
