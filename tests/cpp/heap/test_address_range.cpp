// Address ranges: fixed addresses, changing memory behind them; unmapped addresses fault.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>

#include "heap/segment.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using heap::AddressRange;
using heap::Segment;

namespace {

/// Whether `access` kills a process.
template <class Access>
bool kills(const Access& access) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    access();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

bool faults(const std::byte* at) {
  return kills([at] { (void)*static_cast<const volatile std::byte*>(at); });
}

bool faults_in_writing(std::byte* at) {
  return kills([at] { *static_cast<volatile std::byte*>(at) = std::byte{1}; });
}

}  // namespace

TEST(AddressRange, shows_the_segment_that_is_mapped) {
  const std::size_t page = heap::page_nbytes();
  AddressRange range = AddressRange::reserve(8 * page);
  Segment ring = Segment::create(4 * page);
  std::byte* const fixed = range.data();
  for (std::size_t slot = 0; slot < 4; ++slot) std::memset(ring.data() + slot * page, static_cast<int>(slot) + 1, page);

  range.map(2 * page, ring, page, 2 * page);
  EXPECT_EQ(static_cast<int>(fixed[2 * page]), 2);
  EXPECT_EQ(static_cast<int>(fixed[4 * page - 1]), 3);
  fixed[2 * page] = std::byte{77};
  EXPECT_EQ(static_cast<int>(ring.data()[page]), 77);

  range.map(2 * page, ring, 3 * page, page);  // another slot at the same address
  EXPECT_EQ(static_cast<int>(fixed[2 * page]), 4);
  EXPECT_TRUE(faults(fixed));
  EXPECT_FALSE(faults(fixed + 2 * page));

  range.unmap(2 * page, 2 * page);
  EXPECT_TRUE(faults(fixed + 2 * page));
  EXPECT_EQ(static_cast<int>(ring.data()[page]), 77);
}

TEST(AddressRange, outlives_the_segment_it_shows) {
  const std::size_t page = heap::page_nbytes();
  AddressRange range = AddressRange::reserve(page);
  {
    Segment segment = Segment::create(page);
    segment.data()[5] = std::byte{55};
    range.map(0, segment, 0, page);
  }
  EXPECT_EQ(static_cast<int>(range.data()[5]), 55);
}

TEST(AddressRange, takes_what_another_one_shows) {
  if (!heap::moves_mappings()) return;  // Linux before 5.13
  const std::size_t page = heap::page_nbytes(), nbytes = heap::table_nbytes() + 3 * page;
  Segment slot = Segment::create(nbytes);
  AddressRange aside = AddressRange::reserve(nbytes), fixed = AddressRange::reserve(4 * heap::table_nbytes());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(aside.data()) % heap::table_nbytes(), std::uintptr_t{0});
  aside.alias(0, slot.data(), nbytes);
  for (const std::size_t offset : {std::size_t{0}, 2 * heap::table_nbytes(), page, 2 * heap::table_nbytes() - page}) {
    std::memset(slot.data(), static_cast<int>(offset / page) + 1, nbytes);
    fixed.take(offset, aside, 0, nbytes);
    EXPECT_EQ(fixed.data()[offset], slot.data()[0]);
    EXPECT_EQ(fixed.data()[offset + nbytes - 1], slot.data()[nbytes - 1]);
    EXPECT_TRUE(faults(aside.data()));
    EXPECT_TRUE(faults(aside.data() + nbytes - 1));
    fixed.data()[offset + 5] = std::byte{99};
    EXPECT_EQ(static_cast<int>(slot.data()[5]), 99);
    aside.take(0, fixed, offset, nbytes);
    EXPECT_TRUE(faults(fixed.data() + offset));
    EXPECT_TRUE(faults(fixed.data() + offset + nbytes - 1));
    EXPECT_EQ(static_cast<int>(aside.data()[5]), 99);
  }
}

TEST(AddressRange, reads_nan_where_something_was) {
  const std::size_t table = heap::table_nbytes(), page = heap::page_nbytes(), nbytes = 5 * table + page;
  AddressRange range = AddressRange::reserve(64 * table, AddressRange::Unmapped::kNan);
  EXPECT_TRUE(faults(range.data()));
  Segment segment = Segment::create(nbytes);
  for (const std::size_t offset : {std::size_t{0}, page, table}) {
    range.map(offset, segment, 0, nbytes);
    range.data()[offset] = std::byte{7};
    range.unmap(offset, nbytes);
    for (const std::size_t at : {std::size_t{0}, table / 2 - 8, table / 2, nbytes - 8}) {
      double wide = 0;
      float narrow = 0;
      std::memcpy(&wide, range.data() + offset + at, sizeof wide);
      std::memcpy(&narrow, range.data() + offset + at, sizeof narrow);
      EXPECT_TRUE(std::isnan(wide));
      EXPECT_TRUE(std::isnan(narrow));
    }
    EXPECT_TRUE(faults_in_writing(range.data() + offset));
    EXPECT_TRUE(faults_in_writing(range.data() + offset + nbytes - 1));
    EXPECT_EQ(static_cast<int>(segment.data()[0]), 7);
  }
  range.map(0, segment, 0, nbytes);
  EXPECT_EQ(static_cast<int>(range.data()[0]), 7);
  AddressRange huge = AddressRange::reserve(std::size_t{8192} * 16 * table, AddressRange::Unmapped::kNan);
  huge.map(0, segment, 0, page);
  huge.unmap(0, page);  // that many mappings would be taken from the rest of the process
  EXPECT_TRUE(faults(huge.data()));
}

TEST(AddressRange, moves) {
  const std::size_t page = heap::page_nbytes();
  AddressRange a = AddressRange::reserve(2 * page);
  std::byte* const data = a.data();
  AddressRange b = std::move(a);
  EXPECT_EQ(b.data(), data);
  a = AddressRange::reserve(page);
  a = std::move(b);
  EXPECT_EQ(a.data(), data);
  EXPECT_EQ(a.nbytes(), 2 * page);
  EXPECT_EQ(AddressRange::reserve(0).nbytes(), std::size_t{0});
}

TEST(AddressRange, names_what_does_not_fit) {
  const std::size_t page = heap::page_nbytes();
  AddressRange range = AddressRange::reserve(4 * page);
  Segment segment = Segment::create(2 * page);
  EXPECT_THROW_WITH(AddressRange::reserve(page + 1), InvalidArgument, std::to_string(page + 1));
  EXPECT_THROW_WITH(range.map(1, segment, 0, page), InvalidArgument, "offset 1");
  EXPECT_THROW_WITH(range.map(0, segment, 7, page), InvalidArgument, "segment_offset 7");
  EXPECT_THROW_WITH(range.map(0, segment, 0, 9), InvalidArgument, "nbytes 9");
  EXPECT_THROW_WITH(range.map(0, segment, page, 2 * page), InvalidArgument, "segment");
  EXPECT_THROW_WITH(range.map(3 * page, segment, 0, 2 * page), InvalidArgument, "address range");
  EXPECT_THROW_WITH(range.unmap(5 * page, 0), InvalidArgument, "address range");
  AddressRange other = AddressRange::reserve(page);
  EXPECT_THROW_WITH(range.take(1, other, 0, page), InvalidArgument, "offset 1 is");
  EXPECT_THROW_WITH(range.take(4 * page, other, 0, page), InvalidArgument, std::to_string(4 * page));
  EXPECT_THROW_WITH(range.take(0, other, 0, 2 * page), InvalidArgument, "to take from");
  EXPECT_THROW_WITH(range.alias(4 * page, segment.data(), page), InvalidArgument, "address range");
  EXPECT_THROW_WITH(range.alias(7, segment.data(), page), InvalidArgument, "offset 7");
  EXPECT_THROW(AddressRange::reserve(std::size_t{1} << 62), SystemError);
}
