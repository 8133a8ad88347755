// Cutting buffers into steps (coll/steps.hpp).
#include "coll/steps.hpp"

#include <algorithm>

namespace zcomm::coll {

namespace {
constexpr std::size_t kLine = 64;
}

StepCursor::StepCursor(std::span<const Item> items, std::size_t element_nbytes, std::size_t parts,
                       std::size_t slot_nbytes)
    : items_(items), element_nbytes_(element_nbytes), parts_(parts), slot_nbytes_(slot_nbytes) {}

bool StepCursor::next(Step& step) {
  step.size = 0;
  std::size_t used = 0;
  while (step.size < Step::kPieces && item_ < items_.size()) {
    const std::size_t left = items_[item_].count - begin_;
    if (left == 0) {
      ++item_, begin_ = 0;
      continue;
    }
    // Whole lines of each part that still fit.
    const std::size_t room = (slot_nbytes_ - used) / parts_ / kLine * kLine;
    const std::size_t fits = room / element_nbytes_;
    if (fits == 0) break;
    const std::size_t count = std::min(left, fits);
    // A short beginning of a large buffer would only make its pieces uneven.
    if (count < left && step.size > 0) break;
    const std::size_t stride = (count * element_nbytes_ + kLine - 1) / kLine * kLine;
    step.pieces[step.size++] = {item_, begin_, count, used, stride};
    used += stride * parts_;
    begin_ += count;
  }
  return step.size > 0;
}

}  // namespace zcomm::coll
