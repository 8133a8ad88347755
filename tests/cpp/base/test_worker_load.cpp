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

TEST(worker_load, tells_by_which_threads_a_queue_was_fed) {
  WorkerLoad first, second;
  const ThreadId owner = this_thread();
  const auto serves_only = [&](WorkerLoad& load) {
    bool result = false;
    std::thread([&] {
      load.serve();
      result = WorkerLoad::serves_only(owner);
    }).join();
    return result;
  };
  EXPECT_FALSE(WorkerLoad::serves_only(owner));
  EXPECT_FALSE(serves_only(first));
  first.add();
  first.add();
  EXPECT_TRUE(serves_only(first));
  std::thread([&] {
    first.serve();
    second.add();
    EXPECT_TRUE(serves_only(second));  // by one that the owner feeds
    first.done();
  }).join();
  std::thread([&] { first.add(); }).join();
  EXPECT_FALSE(serves_only(first));
  first.add();
  EXPECT_FALSE(serves_only(first));
}
