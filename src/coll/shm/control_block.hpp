// ControlBlock: the state that one rank publishes to the others, and the host-wide memory that holds it.
//
// Each rank owns one segment: its ControlBlock, then room for two small messages, then its staging slots. All ranks map
// all segments. Invariants: only its rank writes a block, except `poison`: only rank 0's word is used, and the first
// failure sets it permanently by compare-and-swap, so every rank reports the same first failure. Thread rule: counters
// as in coll/signal.hpp; `failure` is written before and read after `poison`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "coll/signal.hpp"
#include "coll/signature.hpp"
#include "heap/segment.hpp"
#include "net/mesh.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::coll {

/// The progress of a rank: `arrived` is in entries; `done` counts direct operations, the others count staged steps,
/// over the communicator's life.
enum class Stage { arrived, copied_in, reduced, copied_out, done };
constexpr int kStageCount = 5;

/// A rank's arrival at an operation: its signal's value is the operation's number, published last. A small message
/// travels in the same cache-line pair.
struct alignas(128) Entry : Signal {
  static constexpr std::size_t kPayloadNbytes = 96;
  std::uint64_t identity = 0;
  alignas(16) std::byte payload[kPayloadNbytes] = {};  ///< its first half shares the first line
  std::uint64_t place_in = 0, place_out = 0;
};
static_assert(sizeof(Entry) == 128);

struct ControlBlock {
  // Of operation n in [n % 2]: a rank enters n + 2 after all have entered n + 1, that is, have done with n.
  Entry entries[2];
  Signature signatures[2];
  Counter counters[kStageCount];  ///< [arrived] is not used
  alignas(128) std::atomic<std::uint32_t> closed{0};
  std::atomic<std::uint32_t> suspended{0};  ///< its deadline: see Communicator::suspend_deadline
  std::atomic<std::uint32_t> warned{0};     ///< rank 0's counts: the last operation with late ranks that were reported
  std::atomic<std::uint64_t> owner{0};      ///< mark of process and thread; this and the next: coll/shm/standstill.hpp
  std::atomic<std::uint32_t> held{0};       ///< operation without which the owner cannot continue
  std::atomic<std::uint32_t> rests{0};      ///< last operation, + 1, if no call comes before the owner continues
  alignas(128) std::atomic<std::uint32_t> poison{0};
  char failure[1024] = {};  ///< this rank's message if `poison` names it as the rank that noticed

  Counter& operator[](Stage stage) { return counters[static_cast<int>(stage)]; }
  Signal& signal(Stage stage, std::uint32_t target) {
    if (stage == Stage::arrived) return entries[target & 1];
    return (*this)[stage];
  }
  /// The last operation that it entered; 0: none.
  std::uint32_t last_entered() const {
    const std::uint32_t a = entries[0].value.load(std::memory_order_acquire);
    const std::uint32_t b = entries[1].value.load(std::memory_order_acquire);
    return reached(a, b) ? a : b;
  }
};

class HostMemory {
 public:
  /// Collective over `mesh`. Throws CollectiveMismatch if the options differ between ranks, InvalidArgument.
  HostMemory(net::Mesh& mesh, const CommOptions& options);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(segments_.size()); }
  ControlBlock& block(int rank) const { return *blocks_[static_cast<std::size_t>(rank)]; }
  ControlBlock& own() const { return block(rank_); }
  /// The mailbox of `rank` for the data of small operation `sequence` that do not fit its entry.
  std::byte* mail(int rank, std::uint32_t sequence) const;
  static constexpr std::size_t kMailNbytes = 64 << 10;
  /// CPUs that any of the ranks may use: if each rank is bound to one CPU, more than this rank's mask has.
  int cpu_count() const { return cpu_count_; }
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
  int cpu_count_ = 0;
  std::vector<heap::Segment> segments_;
  std::vector<ControlBlock*> blocks_;
};

}  // namespace zcomm::coll
