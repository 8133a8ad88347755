// Plans: pure index arithmetic of the collectives. No I/O, no threads; tested exhaustively for worlds 1..9.
//
// Words: chunk = the part of a buffer that one rank owns; segment = the pipelined piece of a chunk.
// Source: ring: Patarasuk & Yuan 2009; owner computes: docs/algorithms.md.
#pragma once

#include <cstddef>
#include <vector>

namespace zcomm::coll {

/// Elements [begin, end).
struct Range {
  std::size_t begin = 0, end = 0;
  std::size_t count() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// The chunk of `rank` when `count` elements are dealt to `world_size` ranks: contiguous, in rank order, covering,
/// inner boundaries at multiples of `align`, sizes differing by at most one `align` (the last may be shorter).
Range chunk_of(std::size_t count, int world_size, int rank, std::size_t align);

/// `range` cut into pieces of at most `segment` elements; no piece for an empty range.
std::vector<Range> segments_of(Range range, std::size_t segment);

/// One step of a ring for one rank: send `send` to the next rank, receive `recv` from the previous one,
/// and either add it to the buffer (reduce) or store it.
struct RingStep {
  Range send, recv;
  bool reduce;
  bool operator==(const RingStep&) const = default;
};

/// reduce_scatter: world_size - 1 steps, after which `rank` holds the full sum of chunk `rank`.
std::vector<RingStep> ring_reduce_scatter(std::size_t count, int world_size, int rank, std::size_t align);
/// all_gather: world_size - 1 steps; `rank` starts with chunk `rank`.
std::vector<RingStep> ring_all_gather(std::size_t count, int world_size, int rank, std::size_t align);
/// all_reduce: the two after each other.
std::vector<RingStep> ring_all_reduce(std::size_t count, int world_size, int rank, std::size_t align);

}  // namespace zcomm::coll
