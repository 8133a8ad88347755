// See plan.hpp. Everything here is arithmetic on indices.
#include "coll/plan.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace zcomm::coll {

namespace {

void check_world(int world_size, int rank, std::size_t align) {
  if (world_size < 1) throw InvalidArgument(text("world_size ", world_size, " is less than 1"));
  if (rank < 0 || rank >= world_size) throw InvalidArgument(text("rank ", rank, " is not in [0, ", world_size, ")"));
  if (align == 0) throw InvalidArgument("align is 0");
}

}  // namespace

Range chunk_of(std::size_t count, int world_size, int rank, std::size_t align) {
  check_world(world_size, rank, align);
  const auto ranks = static_cast<std::size_t>(world_size);
  const std::size_t blocks = count / align + (count % align != 0 ? 1 : 0);
  const auto boundary = [&](std::size_t r) {
    return std::min(count, (r * (blocks / ranks) + std::min(r, blocks % ranks)) * align);
  };
  const auto r = static_cast<std::size_t>(rank);
  return {boundary(r), boundary(r + 1)};
}

}  // namespace zcomm::coll
