// Cutting parts into pieces (coll/cuda/part_pieces.hpp).
#include "coll/cuda/part_pieces.hpp"

#include <algorithm>

namespace zcomm::coll {

std::size_t PartPieces::buffer_nbytes(std::span<const Item> items, int world_size, std::size_t element_nbytes,
                                      std::size_t most_nbytes) {
  const auto others = static_cast<std::size_t>(world_size - 1);
  std::size_t all = 0;
  for (const Item& item : items) all += others * aligned(item.count * element_nbytes);
  return std::min(all, std::max(most_nbytes, others * kAlign));
}

PartPieces::PartPieces(std::span<const Item> items, int world_size, std::size_t element_nbytes,
                       std::size_t buffer_nbytes)
    : items_(items),
      others_(static_cast<std::size_t>(world_size - 1)),
      element_nbytes_(element_nbytes),
      buffer_nbytes_(buffer_nbytes) {}

std::span<const PartPiece> PartPieces::next() {
  pieces_.clear();
  std::size_t used = 0;
  while (item_ < items_.size()) {
    const Item& item = items_[item_];
    const std::size_t left = item.count - begin_;
    const std::size_t room =
        others_ == 0 ? left : (buffer_nbytes_ - used) / others_ / kAlign * kAlign / element_nbytes_;
    const std::size_t count = std::min(left, room);
    if (count == 0 && left != 0) break;
    const std::size_t stride = aligned(count * element_nbytes_);
    if (count != 0) pieces_.push_back({&item, begin_, count, used, stride});
    used += others_ * stride;
    begin_ += count;
    if (begin_ < item.count) break;
    ++item_, begin_ = 0;
  }
  return pieces_;
}

}  // namespace zcomm::coll
