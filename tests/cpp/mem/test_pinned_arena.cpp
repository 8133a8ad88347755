#include <sys/resource.h>

#include <cerrno>
#include <cstdlib>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "mem_test.hpp"
#include "zcomm/error.hpp"
#include "zcomm/pinned_arena.hpp"

using namespace zcomm;
using namespace zcomm::test;

TEST(PinnedArena, exact_pages_zeroed_and_counted) {
  PinnedArena arena;
  const std::size_t huge = std::size_t{2} << 20;
  for (const std::size_t nbytes :
       {std::size_t{1}, std::size_t{4096}, std::size_t{4097}, huge, huge + 1, 3 * huge + 5}) {
    const auto lease = arena.allocate(nbytes);
    EXPECT_EQ(lease.nbytes(), nbytes);
    const auto address = reinterpret_cast<std::uintptr_t>(lease.data());
    EXPECT_EQ(address % (nbytes >= huge ? huge : 4096), 0u);
    EXPECT_EQ(arena.stats().used_nbytes, (nbytes + 4095) / 4096 * 4096);
    std::size_t sum = 0;
    for (std::size_t i = 0; i < nbytes; ++i) sum += static_cast<std::size_t>(lease.data()[i]);
    EXPECT_EQ(sum, 0u);
    lease.data()[nbytes - 1] = std::byte{1};
  }
  EXPECT_EQ(arena.stats().used_nbytes, 0u);
  EXPECT_EQ(arena.stats().allocation_count, 6u);
  EXPECT_EQ(arena.stats().peak_nbytes, 3 * huge + 4096);
}

TEST(PinnedArena, empty_lease) {
  PinnedArena arena;
  const auto lease = arena.allocate(0);
  EXPECT_TRUE(lease.data() == nullptr);
  EXPECT_EQ(arena.stats().used_nbytes, 0u);
}

TEST(PinnedArena, budget_is_an_error_that_names_it) {
  PinnedArena arena({std::size_t{10000}, true, false});
  const auto first = arena.allocate(4096);
  try {
    arena.allocate(5000);
    EXPECT_TRUE(false);
  } catch (const SystemError& error) {
    EXPECT_EQ(error.code, ENOMEM);
    const std::string what = error.what();
    for (const char* part : {"5000 bytes asked", "4096 bytes used", "budget 10000", "RLIMIT_MEMLOCK (ulimit -l) "})
      EXPECT_TRUE(what.find(part) != std::string::npos);
  }
  EXPECT_EQ(arena.stats().used_nbytes, 4096u);
  arena.allocate(4000);  // freed immediately
  EXPECT_EQ(arena.stats().used_nbytes, 4096u);
}

TEST(PinnedArena, more_than_any_machine_has) {
  PinnedArena arena;
  EXPECT_THROW_WITH(arena.allocate(std::numeric_limits<std::size_t>::max()), SystemError, "budget none");
  EXPECT_THROW(arena.allocate(std::size_t{1} << 60), SystemError);
  EXPECT_EQ(arena.stats().used_nbytes, 0u);
  EXPECT_EQ(arena.stats().peak_nbytes, 0u);  // refused memory was never used
}

TEST(PinnedArena, a_lease_moves_and_outlives_its_arena) {
  std::optional<PinnedArena> arena(std::in_place);
  auto lease = arena->allocate(5000);
  std::byte* data = lease.data();
  auto other = arena->allocate(100);
  other = std::move(lease);
  EXPECT_EQ(arena->stats().used_nbytes, 8192u);  // the 100 bytes went
  arena.reset();
  EXPECT_TRUE(other.data() == data);
  other.data()[4999] = std::byte{7};
}

TEST(PinnedArena, a_lease_as_elements) {
  PinnedArena arena;
  const auto lease = arena.allocate(40);
  const std::span<double> values = lease.as<double>();
  EXPECT_EQ(values.size(), 5u);
  values[4] = 2.5;
  EXPECT_TRUE(reinterpret_cast<std::byte*>(&values[5]) == lease.data() + lease.nbytes());
  struct Three {
    char bytes[3];
  };
  EXPECT_THROW_WITH(lease.as<Three>(), InvalidArgument, "40 bytes");
  EXPECT_TRUE(arena.allocate(0).as<float>().empty());
}

TEST(PinnedArena, the_process_has_a_high_water_mark) {
  PinnedArena one, other;
  const auto held = one.allocate(4096);
  const auto before = one.stats();
  other.allocate(before.process_peak_nbytes);  // freed immediately
  EXPECT_EQ(one.stats().process_nbytes, before.process_nbytes);
  EXPECT_EQ(one.stats().process_peak_nbytes, before.process_nbytes + before.process_peak_nbytes);
  EXPECT_EQ(one.stats().peak_nbytes, 4096u);
}

TEST(PinnedArena, many_threads) {
  PinnedArena arena;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&arena] {
      for (std::size_t i = 1; i < 50; ++i) arena.allocate(i * 1000).data()[0] = std::byte{1};
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(arena.stats().used_nbytes, 0u);
  EXPECT_EQ(arena.stats().allocation_count, 4 * 49u);
}

TEST(PinnedArena, the_process_has_a_budget_over_all_arenas) {
  const int status = in_child([] {
    ::setenv("ZCOMM_PINNED_BUDGET", "20K", 1);
    PinnedArena one, other;
    auto first = one.allocate(12288);
    const auto second = other.allocate(8192);
    try {
      other.allocate(1);
      return 1;
    } catch (const SystemError& error) {
      const std::string what = error.what();
      if (error.code != ENOMEM || what.find("all arenas 20480 bytes, ZCOMM_PINNED_BUDGET 20480") == std::string::npos)
        return 2;
    }
    if (other.stats().used_nbytes != 8192 || other.stats().process_nbytes != 20480) return 3;
    first = {};
    other.allocate(12288);  // budget freed by one is available to the other
    if (one.stats().process_nbytes != 8192 || one.stats().process_peak_nbytes < 20480) return 6;
    if (one.stats().peak_nbytes != 12288 || other.stats().peak_nbytes != 20480) return 7;
    for (const char* wrong : {"x", "1T", "-1", "5 G", "99999999999G"}) {
      ::setenv("ZCOMM_PINNED_BUDGET", wrong, 1);
      try {
        PinnedArena never;
        return 4;
      } catch (const InvalidArgument& error) {
        if (std::string(error.what()).find(wrong) == std::string::npos) return 5;
      }
    }
    return 0;
  });
  EXPECT_EQ(status, 0);
}

TEST(PinnedArena, resident_memory_is_locked_until_memlock_ends) {
  if (kSanitized) return;  // sanitizers disable mlock
  const int status = in_child([] {
    const rlimit limit{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 0;                   // a lower hard limit already
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0) return 1;  // root may lock all it likes
    PinnedArena arena({std::nullopt, true, true}), free_one;
    auto held = arena.allocate(512 << 10);
    if (arena.stats().locked_nbytes != 512 << 10) return 2;
    for (int round = 0; round < 100; ++round) {  // a refusal keeps nothing
      try {
        arena.allocate(768 << 10);
        return 3;
      } catch (const SystemError& error) {
        const std::string what = error.what();
        for (const char* part : {"786432 bytes asked", "budget none", "RLIMIT_MEMLOCK (ulimit -l) 1048576", "mlock: "})
          if (what.find(part) == std::string::npos) return 4;
      }
    }
    if (arena.stats().used_nbytes != 512 << 10 || arena.stats().locked_nbytes != 512 << 10) return 5;
    free_one.allocate(64 << 20);  // without the option there is no limit
    held = {};
    if (arena.stats().locked_nbytes != 0) return 6;
    return arena.allocate(768 << 10).nbytes() == 768 << 10 ? 0 : 7;
  });
  EXPECT_EQ(status, 0);
}
