// PartPieces: which elements of a reduce_scatter pass through the receiving buffer together, when every rank sends each
// other rank that rank's part (nccl).
//
// A buffer of limited size takes a pass: pieces of this rank's parts, as many as fit, from each other rank. All ranks
// cut alike, because they know the same counts. Pure arithmetic; thread rule: none of its own.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "coll/operation.hpp"

namespace zcomm::coll {

/// Elements [begin, begin + count) of each rank's part of one item. `at`: bytes from the start of the buffer to the
/// first of world_size - 1 pieces; each takes `stride` bytes.
struct PartPiece {
  const Item* item;
  std::size_t begin, count, at, stride;

  /// Offset of the piece of `peer` in the buffer of rank `rank`, in bytes.
  std::size_t place(int peer, int rank) const {
    return at + stride * static_cast<std::size_t>(peer < rank ? peer : peer - 1);
  }
};

class PartPieces {
 public:
  /// Bytes of the buffer that an operation needs, `most_nbytes` at most: 0 in a world of one.
  static std::size_t buffer_nbytes(std::span<const Item> items, int world_size, std::size_t element_nbytes,
                                   std::size_t most_nbytes);

  PartPieces(std::span<const Item> items, int world_size, std::size_t element_nbytes, std::size_t buffer_nbytes);
  /// The pieces of the next pass, in order; empty after the last.
  std::span<const PartPiece> next();

 private:
  static constexpr std::size_t kAlign = 256;  // of a piece: that of device memory
  static std::size_t aligned(std::size_t nbytes) { return (nbytes + kAlign - 1) / kAlign * kAlign; }

  std::span<const Item> items_;
  const std::size_t others_, element_nbytes_, buffer_nbytes_;
  std::size_t item_ = 0, begin_ = 0;
  std::vector<PartPiece> pieces_;
};

}  // namespace zcomm::coll
