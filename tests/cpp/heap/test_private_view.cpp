// Private views: writes are private to the process, untouched pages follow the segment, merge() keeps a part.
#include <cstring>
#include <thread>

#include "heap/private_view.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using heap::ByteRange;
using heap::PrivateView;
using heap::Segment;

TEST(PrivateView, shows_the_segment_and_keeps_writes_to_itself) {
  const std::size_t page = heap::page_nbytes();
  Segment segment = Segment::create(4 * page);
  std::memset(segment.data(), 1, 4 * page);
  PrivateView view(segment.data(), 4 * page);
  EXPECT_EQ(static_cast<int>(view.data()[4 * page - 1]), 1);
  EXPECT_TRUE(view.copied().empty());  // reading copies nothing

  view.data()[page + 7] = std::byte{9};
  EXPECT_EQ(static_cast<int>(segment.data()[page + 7]), 1);
  const std::vector<ByteRange> second = {{page, 2 * page}};
  EXPECT_TRUE(view.copied() == second);

  segment.data()[3 * page] = std::byte{5};  // another rank's write
  EXPECT_EQ(static_cast<int>(view.data()[3 * page]), 5);
}

TEST(PrivateView, merge_keeps_the_own_part_and_drops_the_rest) {
  const std::size_t page = heap::page_nbytes();
  Segment segment = Segment::create(6 * page);
  std::memset(segment.data(), 1, 6 * page);
  PrivateView view(segment.data(), 6 * page);
  std::memset(view.data(), 2, 6 * page);
  // The own part begins and ends in the middle of pages, as the shards of ranks do.
  const std::size_t begin = page + 64, end = 3 * page + 128;
  const std::vector<ByteRange> own = {{begin, begin + 64}, {begin + 128, end}};
  EXPECT_EQ(view.merge(own), 6 * page);
  EXPECT_TRUE(view.copied().empty());
  for (std::size_t i = 0; i < 6 * page; ++i) {
    const bool mine = (i >= begin && i < begin + 64) || (i >= begin + 128 && i < end);
    EXPECT_EQ(static_cast<int>(segment.data()[i]), mine ? 2 : 1);
    EXPECT_EQ(static_cast<int>(view.data()[i]), mine ? 2 : 1);
  }
  EXPECT_EQ(view.merge(own), 0u);
}

TEST(PrivateView, ranks_that_edit_alike_get_the_edit_once) {
  const std::size_t page = heap::page_nbytes(), count = 5 * page;
  Segment segment = Segment::create(count);
  std::memset(segment.data(), 3, count);
  const auto rank = [&](std::size_t r) {
    PrivateView view(segment.data(), count);
    for (std::size_t i = 0; i < count; ++i) view.data()[i] = std::byte(2 * static_cast<unsigned>(view.data()[i]));
    return std::pair(std::move(view), ByteRange{r * count / 2, (r + 1) * count / 2});
  };
  auto [first, first_part] = rank(0);
  auto [second, second_part] = rank(1);
  std::thread other([&, &view = second, &part = second_part] { view.merge(std::span(&part, 1)); });
  first.merge(std::span(&first_part, 1));
  other.join();
  for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(static_cast<int>(first.data()[i]), 6);
}

TEST(PrivateView, large_views_with_scattered_writes) {
  const std::size_t page = heap::page_nbytes(), pages = 5000;  // more regions than one scan returns
  Segment segment = Segment::create(pages * page);
  PrivateView view(segment.data(), pages * page);
  for (std::size_t i = 0; i < pages; i += 2) view.data()[i * page] = std::byte{1};
  EXPECT_EQ(view.copied().size(), pages / 2);
  const ByteRange all{0, pages * page};
  EXPECT_EQ(view.merge(std::span(&all, 1)), pages / 2 * page);
  for (std::size_t i = 0; i < pages; ++i) EXPECT_EQ(static_cast<int>(segment.data()[i * page]), i % 2 == 0 ? 1 : 0);
}

TEST(PrivateView, outlives_the_segment_object_and_refuses_foreign_memory) {
  const std::size_t page = heap::page_nbytes();
  std::unique_ptr<PrivateView> view;
  {
    Segment segment = Segment::create(2 * page);
    segment.data()[page] = std::byte{4};
    view = std::make_unique<PrivateView>(segment.data() + page, page);
    EXPECT_THROW(PrivateView(segment.data() + 8, page), InvalidArgument);
    EXPECT_THROW(PrivateView(segment.data(), 3 * page), InvalidArgument);
  }
  EXPECT_EQ(static_cast<int>(view->data()[0]), 4);
  std::byte local{};
  EXPECT_THROW(PrivateView(&local, 1), InvalidArgument);
}
