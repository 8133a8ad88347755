// Plans: the work of each rank in a collective, as lists of actions with offsets. Pure index arithmetic: no I/O, no
// threads, no memory but their own; tested for worlds 1 to 9 and odd counts. Engines run the lists.
//
// Here: chunks, and the actions of plans. coll/staged_plan.hpp: the pipeline through staging slots (host and devices).
// coll/tcp/ring_plan.hpp: the ring. Terms: chunk = the part of a buffer that one rank owns. Source: owner computes:
// docs/internals/algorithms.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm::coll {

/// Elements [begin, end).
struct Range {
  std::size_t begin = 0, end = 0;
  std::size_t count() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// The chunk of `rank` when `count` elements are divided among `world_size` ranks: contiguous, in rank order, covering,
/// inner boundaries at multiples of `align`, sizes differing by at most one `align` (the last may be shorter).
Range chunk_of(std::size_t count, int world_size, int rank, std::size_t align);

/// Chunks of all_reduce within a host begin at multiples of this many elements.
constexpr std::size_t kChunkAlign = 64;

/// One move of `count` elements, by one rank.
struct Action {
  enum class Kind : std::uint8_t {
    copy,   ///< from this rank's input to its output
    send,   ///< to a slot or socket that a peer reads
    recv,   ///< the data that a peer has sent
    reduce  ///< the received data and this rank's input, to one result
  };
  enum class Memory : std::uint8_t {
    none,
    input,
    output,
    slot,  ///< a buffer of the algorithm
    raw,   ///< another buffer, for data received in the input's dtype while slots hold sums of a wider one
  };

  Kind kind = Kind::copy;
  Memory from = Memory::none;
  Memory to = Memory::none, also_to = Memory::none;  ///< also_to: the result of a reduction goes there, too
  int peer = -1;                ///< the other rank; -1: all that read the slot (send), all (reduce)
  std::size_t buffer = 0;       ///< which input and output
  std::size_t in = 0, out = 0;  ///< elements into them
  std::size_t slot = 0;         ///< bytes into the slot, or the slots
  std::size_t count = 0;
};

}  // namespace zcomm::coll
