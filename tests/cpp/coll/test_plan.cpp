// Plans, exhaustively: every world 1..9, awkward counts and alignments.
#include <algorithm>
#include <vector>

#include "coll/plan.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::coll;

namespace {

constexpr int kMaxWorld = 9;

std::vector<std::size_t> awkward_counts() {
  std::vector<std::size_t> counts;
  for (std::size_t count = 0; count <= 33; ++count) counts.push_back(count);
  for (const std::size_t count : {63, 64, 65, 127, 129, 1000, 1001, 1024}) counts.push_back(count);
  return counts;
}

template <class Body>
void for_all(Body body) {
  for (int world_size = 1; world_size <= kMaxWorld; ++world_size) {
    for (const std::size_t count : awkward_counts()) {
      for (const std::size_t align : {std::size_t{1}, std::size_t{3}, std::size_t{16}, std::size_t{64}}) {
        body(count, world_size, align);
      }
    }
  }
}

}  // namespace

TEST(Plan, chunks_cover_in_order_and_are_even) {
  for_all([](std::size_t count, int world_size, std::size_t align) {
    std::size_t next = 0, smallest = count, largest = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      const Range chunk = chunk_of(count, world_size, rank, align);
      EXPECT_EQ(chunk.begin, next);
      EXPECT_LE(chunk.begin, chunk.end);
      next = chunk.end;
      if (chunk.end != count) EXPECT_EQ(chunk.end % align, std::size_t{0});
      const std::size_t blocks = (chunk.count() + align - 1) / align;
      smallest = std::min(smallest, blocks);
      largest = std::max(largest, blocks);
    }
    EXPECT_EQ(next, count);
    EXPECT_LE(largest, smallest + 1);
  });
}

TEST(Plan, names_impossible_arguments) {
  EXPECT_THROW_WITH(chunk_of(10, 0, 0, 1), InvalidArgument, "world_size 0");
  EXPECT_THROW_WITH(chunk_of(10, 3, 3, 1), InvalidArgument, "rank 3");
  EXPECT_THROW_WITH(chunk_of(10, 3, 0, 0), InvalidArgument, "align");
  EXPECT_THROW_WITH(chunk_of(10, 3, -1, 1), InvalidArgument, "rank -1");
}
