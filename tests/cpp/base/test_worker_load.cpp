// Threads that serve a queue, and whether they rest.
#include <thread>

#include "base/worker_load.hpp"
#include "test.hpp"

using namespace zcomm;

TEST(worker_load, tells_a_thread_with_calls_left_from_one_that_rests) {
  EXPECT_FALSE(WorkerLoad::any_left(nullptr));
  WorkerLoad load;
  ThreadId thread = nullptr;
  std::thread([&] {
    load.serve();
    EXPECT_TRUE(WorkerLoad::serves());
    thread = this_thread();
  }).join();
  EXPECT_FALSE(WorkerLoad::serves());
  EXPECT_FALSE(thread == this_thread());
  load.add();
  EXPECT_TRUE(WorkerLoad::any_left(this_thread()));
  EXPECT_FALSE(WorkerLoad::any_left(thread));
  load.done();
  EXPECT_FALSE(WorkerLoad::any_left(nullptr));
  EXPECT_FALSE(WorkerLoad::is_awaited(thread));
  load.await(+1);
  EXPECT_TRUE(WorkerLoad::is_awaited(thread));
  EXPECT_FALSE(WorkerLoad::is_awaited(this_thread()));
  load.await(-1);
  EXPECT_FALSE(WorkerLoad::is_awaited(thread));
}
