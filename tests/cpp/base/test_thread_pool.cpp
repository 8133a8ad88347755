// The pool that all of the core shares: resized while it is in use, and in forked children.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/thread_pool.hpp"
#include "child.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;

namespace {

/// The sum of 0 .. count - 1 by a parallel loop.
std::uint64_t sum(ThreadPool& pool, std::size_t count) {
  std::atomic<std::uint64_t> total{0};
  pool.parallel_for(count, 16, 0, [&total](std::size_t begin, std::size_t end) {
    std::uint64_t part = 0;
    for (std::size_t i = begin; i < end; ++i) part += i;
    total += part;
  });
  return total;
}

}  // namespace

TEST(ThreadPool, the_shared_pool_changes_its_size_while_other_threads_use_it) {
  constexpr std::size_t kCount = 10000;
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> users;
  for (int i = 0; i < 3; ++i)
    users.emplace_back([&] {
      ThreadPool& pool = ThreadPool::shared();  // kept over many changes
      while (!stop)
        if (sum(pool, kCount) != kCount * (kCount - 1) / 2) ++wrong;
    });
  for (int round = 0; round < (test::few_values() ? 40 : 200); ++round) {
    ThreadPool::set_default_size(round % 4 + 1);
    EXPECT_EQ(ThreadPool::shared().size(), round % 4 + 1);
  }
  stop = true;
  for (std::thread& user : users) user.join();
  EXPECT_EQ(wrong.load(), 0);
  ThreadPool::set_default_size(1);  // leaves no threads
}

TEST(ThreadPool, a_change_waits_for_a_loop_that_asks_for_the_pool) {
  ThreadPool::set_default_size(2);
  std::atomic<bool> begun{false};
  std::thread user([&begun] {
    ThreadPool::shared().parallel_for(64, 1, 0, [&begun](std::size_t, std::size_t) {
      begun = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      EXPECT_GE(ThreadPool::shared().size(), 1);
    });
  });
  while (!begun) std::this_thread::yield();
  ThreadPool::set_default_size(3);
  user.join();
  EXPECT_EQ(ThreadPool::shared().size(), 3);
  ThreadPool::set_default_size(1);
}

TEST(ThreadPool, resizes_to_any_size_and_refuses_none) {
  ThreadPool pool(1);
  for (const int size : {4, 2, 3, 1, 1, 5}) {
    pool.resize(size);
    EXPECT_EQ(pool.size(), size);
    EXPECT_EQ(sum(pool, 1000), 499500u);
  }
  EXPECT_THROW_WITH(pool.resize(0), InvalidArgument, "size 0 is less than 1");
  EXPECT_EQ(pool.size(), 5);
}

#ifndef __SANITIZE_THREAD__  // which ends a forked child that starts threads
TEST(ThreadPool, a_forked_child_has_threads_again_once_the_size_is_set) {
  ThreadPool::set_default_size(3);
  const int code = test::in_child([] {
    if (sum(ThreadPool::shared(), 1000) != 499500u) return 1;  // without workers
    ThreadPool::set_default_size(3);
    return sum(ThreadPool::shared(), 1000) == 499500u ? 0 : 2;
  });
  EXPECT_EQ(code, 0);
  ThreadPool::set_default_size(1);
}
#endif
