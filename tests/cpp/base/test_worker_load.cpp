// Threads that serve a queue, and whether they rest.
#include <sys/wait.h>
#include <unistd.h>

#include <set>
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
  EXPECT_FALSE(WorkerLoad::is_awaited(thread, this_thread()));
  load.begin_wait();
  EXPECT_TRUE(WorkerLoad::is_awaited(thread, this_thread()));
  EXPECT_FALSE(WorkerLoad::is_awaited(thread, thread));
  EXPECT_FALSE(WorkerLoad::is_awaited(this_thread(), this_thread()));
  load.end_wait();
  EXPECT_FALSE(WorkerLoad::is_awaited(thread, this_thread()));
}

TEST(worker_load, threads_that_have_ended_leave_no_name) {
  std::set<ThreadId> names;
  for (int i = 0; i < 3; ++i) std::thread([&] { names.insert(this_thread()); }).join();
  EXPECT_EQ(names.size(), 3u);
}

TEST(worker_load, a_forked_child_lacks_the_threads) {
  WorkerLoad load;
  load.add();
  const pid_t child = ::fork();
  if (child == 0) {
    const WorkerLoad own;
    ::_exit(WorkerLoad::any_left(this_thread()) ? 1 : 0);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(WorkerLoad::any_left(this_thread()));
}
