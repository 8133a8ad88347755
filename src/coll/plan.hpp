// Plans: pure index arithmetic of the collectives. No I/O, no threads; tested exhaustively for worlds 1..9.
//
// Words: chunk = the part of a buffer that one rank owns. Source: owner computes: docs/internals/algorithms.md.
#pragma once

#include <cstddef>

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

}  // namespace zcomm::coll
