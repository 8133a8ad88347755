#include "mem/extents.hpp"

#include <algorithm>
#include <iterator>

namespace zcomm::mem {

std::uint64_t Extents::take(std::size_t nbytes) {
  const std::uint64_t need = round_up(nbytes, kExtentAlign);
  if (need == 0) return 0;
  used_ += need;
  const auto hole = std::find_if(holes_.begin(), holes_.end(), [&](const auto& h) { return h.second >= need; });
  if (hole == holes_.end()) {
    const std::uint64_t offset = end_;
    end_ += need;
    return offset;
  }
  const auto [offset, length] = *hole;
  holes_.erase(hole);
  if (length > need) holes_[offset + need] = length - need;
  return offset;
}

void Extents::give_back(std::uint64_t offset, std::size_t nbytes) {
  std::uint64_t length = round_up(nbytes, kExtentAlign);
  if (length == 0) return;
  used_ -= length;
  auto next = holes_.lower_bound(offset);
  if (next != holes_.end() && offset + length == next->first) {
    length += next->second;
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      length += before->second;
      holes_.erase(before);
    }
  }
  if (offset + length == end_) {
    end_ = offset;
  } else {
    holes_[offset] = length;
  }
}

std::size_t block_count(std::size_t nbytes, std::size_t block_nbytes, std::size_t alignment) {
  const std::size_t whole = nbytes / alignment * alignment;
  return static_cast<std::size_t>(round_up(whole, block_nbytes) / block_nbytes) + (whole < nbytes ? 1 : 0);
}

Block block_at(std::size_t index, std::size_t nbytes, std::size_t block_nbytes, std::size_t alignment) {
  const std::size_t whole = nbytes / alignment * alignment;
  const std::size_t begin = std::min(index * block_nbytes, whole);
  if (begin == whole) return {whole, nbytes - whole};
  return {begin, std::min(block_nbytes, whole - begin)};
}

}  // namespace zcomm::mem
