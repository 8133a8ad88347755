// TcpChunks: the location of an operation's chunks in its list of tensors. Pure index arithmetic.
//
// The list is one virtual buffer. Shape::whole: it is cut into one chunk per rank, whatever tensor a cut falls in.
// Shape::parts: each tensor holds one part per rank; chunk r is part r of the first tensor, then of the second...
// Thread rule: one thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "coll/operation.hpp"
#include "coll/plan.hpp"

namespace zcomm::coll {

class TcpChunks {
 public:
  enum class Shape { whole, parts };
  static constexpr std::size_t kAlign = 64;  ///< chunks of Shape::whole begin at multiples of this many elements

  void set(std::span<const Item> items, Shape shape, int world_size);

  std::span<const Item> items() const { return items_; }
  /// Elements of the chunk.
  std::size_t count(int chunk) const;
  /// Elements of the largest chunk.
  std::size_t largest() const { return count(0); }
  /// Elements of all tensors, as one rank lists them (Shape::parts: of one part).
  std::size_t total() const { return starts_.back(); }

  /// visit(item, offset, count, at) for each piece of elements [begin, end) of `chunk`: `offset` elements into the
  /// item's data, `at` elements into the chunk.
  template <class Visit>
  void pieces(int chunk, std::size_t begin, std::size_t end, const Visit& visit) const {
    const std::size_t first = shape_ == Shape::whole ? chunk_of(total(), world_size_, chunk, kAlign).begin : 0;
    auto next = std::upper_bound(starts_.begin(), starts_.end(), first + begin) - starts_.begin();
    for (std::size_t at = begin; at < end; ++next) {
      const auto index = static_cast<std::size_t>(next - 1);
      const Item& item = items_[index];
      const std::size_t skip = first + at - starts_[index];
      const std::size_t count = std::min(end - at, starts_[index + 1] - first - at);
      if (count == 0) continue;
      const std::size_t part = shape_ == Shape::parts ? static_cast<std::size_t>(chunk) * item.count : 0;
      visit(item, part + skip, count, at);
      at += count;
    }
  }

 private:
  std::span<const Item> items_;
  Shape shape_ = Shape::whole;
  int world_size_ = 1;
  std::vector<std::size_t> starts_;  // of each item in the virtual buffer, and its end
};

}  // namespace zcomm::coll
