// RingPlan: one rank's sends, receives and sums in one lane of the ring ([Note: ring lanes] in coll/tcp/ring.hpp).
//
// Two lists of size() actions: send(i), and recv(i), which reduce(i) follows in the steps that reduce. They are
// computed, not stored: any index at any time. may_send() and may_receive() bound the distance between the two.
// `buffer` of an action is a chunk, `in` and `out` are elements into it, `slot` is bytes into kSlots slots.
//
// [Note: ring order] Step s sends the data that step s - 1 received: first partial sums, to which each rank adds its
// own part as a segment arrives, then finished chunks, which are received in place. A lane sends segments in groups of
// kWindow: all steps of the first group, then the second. A segment is sent on kWindow segments after it was received,
// so sums need only 2 * kWindow segments, which fit the cache. With fewer than kWindow + 1 slots the ring could fill up
// and deadlock. Invariants: recv(i) of a rank is send(i) of the rank before it, of equally many elements. A slot is
// written again only when its contents have been sent: received sums are never more than kSlots ahead of sent sums.
// Each element of a chunk is summed once, in ring order, ending with the chunk's owner: way 0 begins with the rank
// after it, way 1 with the rank before it (decision D3). all_reduce of 3 ranks, way 0, as rank r sees it (mod 3):
//   step  sends chunk             receives chunk  which then
//   0     r-1, from the input     r-2             gets this rank's part added, in a slot
//   1     r-2, from the slot      r               gets this rank's part added: finished, in the output
//   2     r, from the output      r-1             is finished, in the output
//   3     r-1, from the output    r-2             is finished, in the output
// Thread rule: one thread. Source: Patarasuk, Yuan 2009; decision D2.
#pragma once

#include <cstddef>

#include "coll/plan.hpp"
#include "coll/tcp/chunks.hpp"

namespace zcomm::coll {

class RingPlan {
 public:
  static constexpr std::size_t kWindow = 4;
  static constexpr std::size_t kSlots = 2 * kWindow;

  struct Shape {
    int rank, world_size;
    int way;  ///< 0: to the rank after; 1: to the rank before
    int lane, lanes;
    bool reduces, gathers;
    bool raw_first;             ///< the first step's segments are narrower than sums: they arrive in memory `raw`
    std::size_t segment_count;  ///< elements
    std::size_t slot_nbytes;
  };

  RingPlan() = default;
  /// `chunks` must outlive the plan.
  RingPlan(const Shape& shape, const TcpChunks& chunks);

  /// Of sends, and of receives. Some may be empty: chunks differ in size.
  std::size_t size() const { return groups_ * steps_ * kWindow; }
  Action send(std::size_t i) const;
  Action recv(std::size_t i) const;
  /// Whether reduce(i) follows recv(i).
  bool is_reduced(std::size_t i) const { return step_of(i) < reduce_steps_; }
  Action reduce(std::size_t i) const;

  /// Whether the next send may begin: its data have been received.
  bool may_send(std::size_t sent, std::size_t received) const {
    return sent < size() && (step_of(sent) == 0 || sent < received + kWindow);
  }
  /// Whether the next receive may begin: there is a free slot for it.
  bool may_receive(std::size_t sent, std::size_t received) const {
    return received < size() && (!is_reduced(received) || slots_before(received, 0) < slots_before(sent, 1) + kSlots);
  }

 private:
  std::size_t step_of(std::size_t i) const { return i / kWindow % steps_; }
  std::size_t slots_before(std::size_t i, std::size_t first_step) const;
  std::size_t slot(std::size_t i, std::size_t first_step) const {
    return slots_before(i, first_step) % kSlots * shape_.slot_nbytes;
  }
  int chunk_sent(std::size_t step) const;
  int chunk_received(std::size_t step) const;
  Action segment(std::size_t i, int chunk) const;

  Shape shape_{};
  const TcpChunks* chunks_ = nullptr;
  std::size_t reduce_steps_ = 0, steps_ = 1, groups_ = 0;
};

}  // namespace zcomm::coll
