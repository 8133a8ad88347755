// Segments: zero-filled, shared between processes, mapped once per process, sealed, no descriptor leaked.
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "heap/segment.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using heap::Segment;

namespace {

int open_descriptors() {
  DIR* const dir = ::opendir("/proc/self/fd");
  int count = 0;
  while (::readdir(dir) != nullptr) ++count;
  ::closedir(dir);
  return count;
}

UniqueFd dup_of(const Segment& segment) { return UniqueFd(::fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0)); }

}  // namespace

TEST(Segment, zero_filled_and_writable) {
  for (const std::size_t nbytes : {std::size_t{0}, std::size_t{1}, std::size_t{4096}, std::size_t{10'000'001}}) {
    Segment segment = Segment::create(nbytes);
    EXPECT_TRUE(static_cast<bool>(segment));
    EXPECT_EQ(segment.nbytes(), nbytes);
    EXPECT_TRUE(segment.data() != nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(segment.data()) % heap::page_nbytes(), std::uintptr_t{0});
    EXPECT_TRUE(std::all_of(segment.data(), segment.data() + nbytes, [](std::byte b) { return b == std::byte{0}; }));
    if (nbytes > 0) segment.data()[nbytes - 1] = std::byte{7};
  }
  EXPECT_FALSE(static_cast<bool>(Segment()));
  EXPECT_TRUE(Segment().data() == nullptr);
}

TEST(Segment, large_ones_begin_at_huge_pages) {
  constexpr std::size_t kHuge = std::size_t{2} << 20;
  for (const std::size_t nbytes : {kHuge, kHuge + 1, 5 * kHuge + 8192}) {
    const Segment segment = Segment::create(nbytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(segment.data()) % kHuge, std::uintptr_t{0});
    EXPECT_TRUE(std::all_of(segment.data(), segment.data() + nbytes, [](std::byte b) { return b == std::byte{0}; }));
    struct stat status{};
    EXPECT_EQ(::fstat(segment.fd(), &status), 0);
    EXPECT_LE(static_cast<std::size_t>(status.st_blocks) * 512, nbytes + heap::page_nbytes());  // no page too many
    std::fill_n(segment.data(), nbytes, std::byte{3});
    if (const pid_t child = ::fork(); child == 0) {
      const void* again = ::mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, segment.fd(), 0);
      ::_exit(again != MAP_FAILED && std::memcmp(again, segment.data(), nbytes) == 0 ? 0 : 1);
    } else {
      int ended = 0;
      ::waitpid(child, &ended, 0);
      EXPECT_EQ(ended, 0);
    }
  }
}

TEST(Segment, one_mapping_per_process) {
  Segment first = Segment::create(5000);
  Segment second = Segment::map(dup_of(first), 5000);
  EXPECT_EQ(first.data(), second.data());
  first.data()[17] = std::byte{42};
  first = Segment();
  EXPECT_EQ(static_cast<int>(second.data()[17]), 42);  // the mapping lives as long as one owner
  UniqueFd fd = dup_of(second);
  second = Segment();
  Segment third = Segment::map(std::move(fd), 5000);  // a new mapping: the descriptor kept the memory alive
  EXPECT_EQ(static_cast<int>(third.data()[17]), 42);
}

TEST(Segment, map_and_drop_by_many_threads) {
  Segment segment = Segment::create(4096);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&segment] {
      for (int i = 0; i < 100; ++i) {
        Segment own = Segment::create(100);
        Segment same = Segment::map(dup_of(own), 100);
        Segment other = Segment::map(dup_of(segment), 4096);
        EXPECT_EQ(own.data(), same.data());
        EXPECT_EQ(other.data(), segment.data());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(Segment, a_forked_process_sees_the_same_memory) {
  Segment segment = Segment::create(8192);
  const pid_t child = ::fork();
  if (child == 0) {
    segment.data()[8191] = std::byte{99};
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(static_cast<int>(segment.data()[8191]), 99);
}

TEST(Segment, nobody_can_change_its_size) {
  Segment segment = Segment::create(8192);
  EXPECT_NE(::ftruncate(segment.fd(), 4096), 0);
  EXPECT_NE(::ftruncate(segment.fd(), 1 << 20), 0);
  EXPECT_NE(::fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(Segment, refuses_what_is_too_short_or_no_segment) {
  Segment segment = Segment::create(4096);
  EXPECT_THROW_WITH(Segment::map(dup_of(segment), 4097), InvalidArgument, "4097");
  UniqueFd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(unsealed.get(), 4096), 0);
  EXPECT_THROW_WITH(Segment::map(std::move(unsealed), 4096), InvalidArgument, "sealed");
  EXPECT_THROW(Segment::map(UniqueFd(), 1), SystemError);
}

TEST(Segment, says_how_many_bytes_it_could_not_get) {
  constexpr std::size_t absurd = std::size_t{1} << 60;
  EXPECT_THROW_WITH(Segment::create(absurd), SystemError, std::to_string(absurd));
  EXPECT_THROW_WITH(Segment::create(std::numeric_limits<std::size_t>::max()), SystemError, "segment of 1844");
}

TEST(Segment, says_when_descriptors_ran_out) {
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit none = before;
  none.rlim_cur = 0;
  ::setrlimit(RLIMIT_NOFILE, &none);
  int code = 0;
  try {
    Segment::create(12345);
  } catch (const SystemError& error) {
    code = error.code;
    EXPECT_TRUE(std::string(error.what()).find("12345") != std::string::npos);
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(code, EMFILE);
}

TEST(Segment, leaves_no_descriptor) {
  const int before = open_descriptors();
  {
    Segment a = Segment::create(1 << 20);
    Segment b = Segment::map(dup_of(a), 1 << 20);
    Segment c = b;
    EXPECT_EQ(open_descriptors(), before + 1);
    EXPECT_THROW(Segment::map(dup_of(a), 2 << 20), InvalidArgument);
  }
  EXPECT_EQ(open_descriptors(), before);
}
