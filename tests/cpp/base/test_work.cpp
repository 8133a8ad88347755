#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "child.hpp"
#include "flush.hpp"
#include "test.hpp"
#include "zcomm/work.hpp"

using namespace zcomm;

TEST(Work, default_is_done) {
  Work work;
  EXPECT_TRUE(work.done());
  work.wait();
}

TEST(Work, wait_rethrows_and_times_out) {
  CompletionPool pool;
  auto completion = pool.acquire();
  Work work(completion);
  EXPECT_FALSE(work.done());
  EXPECT_THROW_WITH(work.wait(0.01), Timeout, "0.01 s");
  completion->finish(std::make_exception_ptr(PeerLost(3, "rank 3 died")));
  EXPECT_TRUE(work.done());
  EXPECT_THROW_WITH(work.wait(), PeerLost, "rank 3");
  EXPECT_THROW(work.wait(), PeerLost);
}

TEST(Work, dropping_waits) {
  CompletionPool pool;
  std::atomic<bool> finished{false};
  auto completion = pool.acquire();
  std::thread runner([&finished, completion] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    finished = true;
    completion->finish();
  });
  {
    Work work(std::move(completion));
  }
  EXPECT_TRUE(finished);
  runner.join();
}

TEST(Work, a_forked_child_has_nothing_to_wait_for) {
  CompletionPool pool;
  auto completion = pool.acquire();
  Work work(completion);
  const int code = test::in_child([&] {
    if (!work.wait_for(10.0)) return 1;
    try {
      work.wait();
      return 2;
    } catch (const Error&) {
    }
    work = Work();  // would wait for ever
    return 0;
  });
  EXPECT_EQ(code, 0);
  EXPECT_FALSE(work.done());
  completion->finish();
  work.wait();
}

TEST(CompletionPool, reuses_what_was_dropped) {
  CompletionPool pool;
  const Completion* first = nullptr;
  for (int i = 0; i < 100; ++i) {
    auto completion = pool.acquire();
    if (first == nullptr) first = completion.get();
    EXPECT_EQ(first, completion.get());
    EXPECT_FALSE(completion->done());
    completion->finish();
  }
}

TEST(ThreadPool, covers_every_index_once) {
  for (const int size : {1, 2, 5}) {
    ThreadPool pool(size);
    for (const std::size_t count :
         {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{64}, std::size_t{1000}}) {
      for (const std::size_t grain : {std::size_t{1}, std::size_t{16}}) {
        std::vector<std::atomic<int>> hits(count);
        pool.parallel_for(count, grain, 0, [&](std::size_t begin, std::size_t end) {
          if (size > 1) EXPECT_EQ(begin % grain, 0u);
          for (std::size_t i = begin; i < end; ++i) ++hits[i];
        });
        for (auto& hit : hits) EXPECT_EQ(hit.load(), 1);
      }
    }
  }
}

TEST(ThreadPool, rethrows) {
  ThreadPool pool(3);
  EXPECT_THROW(pool.parallel_for(100, 1, 0, [](std::size_t, std::size_t) { throw InvalidArgument("no"); }),
               InvalidArgument);
  int calls = 0;
  pool.parallel_for(1, 1, 0, [&](std::size_t, std::size_t) { ++calls; });
  EXPECT_EQ(calls, 1);
}

TEST(ThreadPool, a_caller_that_finds_it_busy_does_pieces_alone) {
  ThreadPool pool(2);
  pool.parallel_for(2, 1, 0, [&](std::size_t, std::size_t) {
    std::thread([&pool] {
      std::vector<std::size_t> ends;
      const auto here = std::this_thread::get_id();
      pool.parallel_for_if_idle(100, 1, 0, 30, [&](std::size_t begin, std::size_t end) {
        EXPECT_TRUE(std::this_thread::get_id() == here && begin == (ends.empty() ? 0 : ends.back()));
        ends.push_back(end);
      });
      EXPECT_EQ(ends, (std::vector<std::size_t>{30, 60, 90, 100}));
    }).join();
  });
}

TEST(ThreadPool, all_threads_do_the_rest_when_the_other_loop_has_ended) {
  ThreadPool pool(2);
  std::atomic<bool> go{false}, began{false};
  std::thread other([&] {
    pool.parallel_for(2, 1, 0, [&](std::size_t, std::size_t) {
      began = true;
      while (!go) std::this_thread::yield();
    });
  });
  while (!began) std::this_thread::yield();
  const auto here = std::this_thread::get_id();
  std::vector<std::atomic<int>> seen(1000);
  std::atomic<std::size_t> elsewhere{0};
  pool.parallel_for_if_idle(1000, 1, 0, 10, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) ++seen[i];
    if (std::this_thread::get_id() != here) elsewhere += end - begin;
    if (begin == 20) {  // the third piece
      go = true;
      other.join();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(begin < 30 ? 0 : 2));
  });
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](const std::atomic<int>& times) { return times == 1; }));
  EXPECT_TRUE(elsewhere.load() > 0);
}

TEST(ThreadPool, in_a_forked_child_the_caller_does_it_all) {
  auto pool = std::make_unique<ThreadPool>(3);
  const auto sum = [&pool] {
    std::atomic<std::size_t> all{0};
    pool->parallel_for(1000, 1, 0, [&](std::size_t begin, std::size_t end) { all += end - begin; });
    return all.load();
  };
  EXPECT_EQ(sum(), 1000u);
  const int code = test::in_child([&] {
    if (sum() != 1000) return 1;
    pool.reset();  // would join threads that are not there
    return 0;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(sum(), 1000u);
}

TEST(ThreadPool, floating_point_is_the_same_on_each_thread) {
  for (const bool before : {true, false}) {  // workers inherit the mode of the thread that starts them
    std::optional<test::FlushSubnormals> flush;
    if (before) flush.emplace();
    ThreadPool pool(3);
    if (!before) flush.emplace();
    for (const std::size_t count : {1u, 300u}) {
      std::atomic<int> kept{0};
      pool.parallel_for(count, 1, 0, [&](std::size_t begin, std::size_t end) {
        if (test::half_of_the_smallest() > 0) kept += static_cast<int>(end - begin);
      });
      EXPECT_EQ(kept.load(), static_cast<int>(count));
    }
    flush.reset();
    EXPECT_TRUE(test::half_of_the_smallest() > 0);
  }
}

TEST(Work, wait_for_tells_and_does_not_throw) {
  CompletionPool pool;
  auto completion = pool.acquire();
  Work work(completion);
  EXPECT_FALSE(work.wait_for(0.01));
  completion->finish(std::make_exception_ptr(Timeout("late")));
  EXPECT_TRUE(work.wait_for(0.01));
  EXPECT_FALSE(completion->error_reported());
  EXPECT_THROW_WITH(work.wait(), Timeout, "late");
  EXPECT_TRUE(completion->error_reported());
}
