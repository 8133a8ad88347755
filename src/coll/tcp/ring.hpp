// TcpRing: reduce_scatter, all_gather and all_reduce over the ring, for large data between hosts.
//
// [Note: ring lanes] Each chunk is cut into lanes: one per socket to a neighbour, half of them round the ring one way,
// half the other (two ranks need but one way: their links carry both). A lane is a ring of its own. It sends on one
// socket and receives on another; the lane of the other way uses the same two in reverse. One thread drives all lanes.
// A lane's plan lists its sends, receives and sums (coll/tcp/ring_plan.hpp). Cost per rank: 2 N (P-1)/P bytes sent
// (all_reduce); sums of 2-byte floats travel as fp32 after the first step, so (P-2)/P N more: nothing for 2 ranks, 1.5
// times at most. Each element is summed once, in ring order from a rank that depends on its chunk and way, so all ranks
// end with the same bits. Thread rule: the thread that runs the operation. Source: Patarasuk, Yuan 2009; decision D2.
#pragma once

#include <cstddef>
#include <vector>

#include "coll/tcp/chunks.hpp"
#include "coll/tcp/reduce.hpp"
#include "coll/tcp/ring_plan.hpp"
#include "coll/tcp/sockets.hpp"

namespace zcomm::coll {

/// One run of the ring over `chunks`.
struct RingJob {
  const TcpChunks* chunks;
  const Signature* signature;
  std::uint64_t identity;
  bool reduces, gathers;
  /// Destination of the reduced own chunk (out_dtype), one chunk long. Null: the chunk's outputs.
  std::byte* result = nullptr;
};

class TcpRing {
 public:
  /// `sockets_per_neighbour` of each are used; the same number on all ranks.
  TcpRing(TcpSockets& sockets, std::size_t segment_nbytes, int sockets_per_neighbour);
  /// For all_gather the own chunk must be in place in the outputs. World of 2 or more.
  void run(const RingJob& job);
  std::size_t nbytes() const;

 private:
  struct Mark {  // first on each stream of an operation
    std::uint64_t magic, identity;
  };
  struct Lane {
    int way, index, next, prev, socket;
    RingPlan plan{};
    std::size_t sent = 0, received = 0;  // of the plan's actions
    Mark mark_in{}, mark_out{};
    bool mark_sent = false, mark_checked = false;
    TcpTransfer send{0, true}, recv{0, false};
    bool sending = false, receiving = false;
    std::vector<std::byte> slots, raw;
  };

  void make_lanes(int sockets_per_neighbour);
  void begin(Lane& lane);
  bool advance_send(Lane& lane);
  bool advance_recv(Lane& lane);
  void prepare(TcpTransfer& transfer, Lane& lane, const Action& action, Action::Memory memory);
  void reduce(Lane& lane, const Action& action);
  void check_mark(Lane& lane) const;
  std::byte* result_of(const Item& item, std::size_t offset, std::size_t at) const;

  TcpSockets& sockets_;
  const std::size_t segment_nbytes_;
  std::vector<Lane> lanes_;

  RingJob job_{};
  TcpReduce reduce_;
  std::size_t element_nbytes_ = 0, segment_count_ = 0;
};

}  // namespace zcomm::coll
