// Steps: the cutting of a list of buffers into pieces that fit a staging slot, several small ones to a slot.
//
// Pure index arithmetic on counts only, so every rank cuts the same way. Each piece (and each rank's part of it) begins
// at a multiple of 64 bytes within the slot.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "coll/operation.hpp"

namespace zcomm::coll {

/// Elements [begin, begin + count) of item `item`; for reduce_scatter and scatter, of every rank's part.
struct Piece {
  std::size_t item = 0;
  std::size_t begin = 0, count = 0;
  std::size_t offset = 0;  ///< in the slot
  std::size_t stride = 0;  ///< from one rank's part to the next in the slot (reduce_scatter, scatter)
};

struct Step {
  static constexpr std::size_t kPieces = 32;
  std::array<Piece, kPieces> pieces;
  std::size_t size = 0;
  std::span<const Piece> all() const { return std::span<const Piece>(pieces).first(size); }
};

class StepCursor {
 public:
  /// `parts`: number of adjacent parts of a piece in a slot (world_size for reduce_scatter and scatter, else 1).
  StepCursor(std::span<const Item> items, std::size_t element_nbytes, std::size_t parts, std::size_t slot_nbytes);
  /// Fills the next step; false when there is none.
  bool next(Step& step);

 private:
  std::span<const Item> items_;
  std::size_t element_nbytes_, parts_, slot_nbytes_;
  std::size_t item_ = 0, begin_ = 0;
};

}  // namespace zcomm::coll
