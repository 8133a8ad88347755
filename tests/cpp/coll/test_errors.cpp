// Errors: arguments, mismatched calls, late ranks, lost ranks, and the errors of later calls on a communicator.
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "coll/support/error_checks.hpp"

using namespace zcomm;
using namespace zcomm::test;
using namespace zcomm::test::calls;

namespace {

void expect_mismatch(int odd, const CommCall& usual, const CommCall& other, std::initializer_list<std::string> parts) {
  const auto run = [](const std::function<void(Rank&)>& body) { run_world(3, small_slots(), body); };
  test::expect_mismatch(run, odd, usual, other, parts);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST(comm_errors, mismatch_names_both_sides) {
  expect_mismatch(
      1, all_reduce(1024), all_reduce(2048),
      {"rank 0, 2: all_reduce float32 sum count=1024 'g'", "rank 1: all_reduce float32 sum count=2048 'g'"});
  expect_mismatch(0, all_reduce(64), all_reduce(64, DType::int32),
                  {"rank 0: all_reduce int32", "rank 1, 2: all_reduce float32"});
  expect_mismatch(2, all_reduce(64), all_reduce(64, DType::float32, ReduceOp::max),
                  {" sum ", "rank 2: all_reduce float32 max"});
  expect_mismatch(2, all_reduce(64), all_reduce(64, DType::float32, ReduceOp::sum, "h"), {"'g'", "'h'"});
  expect_mismatch(1, all_reduce(64), [](Communicator& comm) { comm.barrier("b").wait(); }, {"rank 1: barrier 'b'"});
  expect_mismatch(1, all_reduce_list({10, 20}), all_reduce_list({20, 10}), {"[10, 20]", "[20, 10]"});
  expect_mismatch(1, all_reduce_list({1, 1, 1, 1, 3, 2}), all_reduce_list({1, 1, 1, 1, 2, 3}), {"layout"});
  expect_mismatch(1, all_reduce_list({30}), all_reduce_list({30, 0}), {"in 2 buffers"});
  expect_mismatch(1, reduce_scatter(DType::bfloat16, false), reduce_scatter(DType::float32, false),
                  {"bfloat16 -> float32"});
  expect_mismatch(1, reduce_scatter(DType::float32, false), reduce_scatter(DType::float32, true), {"accumulate"});
  expect_mismatch(1, broadcast(0), broadcast(1), {"root=0", "root=1"});
  expect_mismatch(
      1, [](Communicator& comm) { comm.allocate(100); }, [](Communicator& comm) { comm.allocate(200); },
      {"allocate nbytes=100", "allocate nbytes=200"});
  expect_mismatch(
      1, [](Communicator& comm) { comm.allocate(100); }, [](Communicator& comm) { comm.allocate_shared(100); },
      {"rank 1: allocate_shared nbytes=100"});
  expect_mismatch(1, [](Communicator& comm) { comm.duplicate(); }, all_reduce(1), {"rank 0, 2: duplicate"});
}

TEST(comm_errors, long_names_are_compared_whole) {
  const std::string common(60, 'x');
  expect_mismatch(
      1, [&](Communicator& c) { c.barrier((common + "a").c_str()).wait(); },
      [&](Communicator& c) { c.barrier((common + "b").c_str()).wait(); }, {"barrier 'xxx"});
}

TEST(comm_errors, different_options) {
  Listeners listeners(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      auto mesh = join(listeners, r);
      expect_contains(
          message_of<CollectiveMismatch>([&] { Communicator::create(mesh, {20, 4096, r == 0 ? 4 : 8}); }, "options"),
          {"slot_count=4", "slot_count=8"});
      mesh->leave();
    });
  for (auto& thread : threads) thread.join();
  EXPECT_THROW_WITH(Communicator::create(nullptr), InvalidArgument, "mesh");
}

TEST(comm_errors, arguments) {
  run_worlds(1, 2, [](Rank& self) {
    Communicator& comm = *self.comm;
    std::vector<std::int32_t> ints(8);
    const auto whole = static_cast<std::size_t>(self.world) * 2;
    const Buffer out{ints.data(), 2}, null{nullptr, 3}, bad{ints.data(), whole + 1};
    const ConstBuffer in{ints.data(), whole}, bad_in{ints.data(), whole + 1};
    const std::span<const Buffer> outs(&out, 1);
    EXPECT_THROW_WITH(comm.all_reduce(outs, DType::int32, ReduceOp::avg), InvalidArgument, "avg of int32");
    EXPECT_THROW_WITH(comm.all_reduce({&null, 1}, DType::int32, ReduceOp::sum), InvalidArgument, "null");
    EXPECT_THROW_WITH(comm.broadcast(outs, DType::int32, self.world), InvalidArgument, "root=");
    EXPECT_THROW_WITH(comm.broadcast(outs, DType::int32, -1), InvalidArgument, "root=-1");
    EXPECT_THROW_WITH(comm.reduce_scatter({&bad_in, 1}, outs, DType::int32, ReduceOp::sum, DType::int32, false),
                      InvalidArgument, "world_size");
    EXPECT_THROW_WITH(comm.reduce_scatter({&in, 1}, outs, DType::int32, ReduceOp::sum, DType::float32, false),
                      InvalidArgument, "out_dtype");
    EXPECT_THROW_WITH(comm.reduce_scatter({&in, 1}, {}, DType::int32, ReduceOp::sum, DType::int32, false),
                      InvalidArgument, "1 inputs");
    EXPECT_THROW_WITH(comm.all_gather({&in, 1}, {&bad, 1}, DType::int32), InvalidArgument, "world_size");
    comm.all_reduce(outs, DType::int32, ReduceOp::sum).wait();  // nothing was poisoned
  });
}

TEST(comm_errors, late_rank_is_named) {
  std::atomic<int> gave_up{0};
  run_world(3, small_slots(0.15), [&](Rank& self) {
    self.comm->barrier("first").wait();
    if (self.rank == 1) {
      while (gave_up < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      expect_contains(message_of<Timeout>([&] { self.comm->barrier("late").wait(); }, "late"), {"rank 1"});
      return;
    }
    const auto call = all_reduce(16, DType::float32, ReduceOp::sum, "grad.7");
    std::vector<float> own(16);
    const Buffer buffer{own.data(), 16};
    const std::string message = message_of<Timeout>(
        [&] { self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, "grad.7").wait(); }, "timeout");
    expect_contains(message, {"all_reduce float32 sum count=16 'grad.7' (operation 2)", "for rank 1 to enter it",
                              "rank 1 last entered operation 1, barrier 'first'"});
    expect_contains(message_of<Timeout>([&] { self.comm->barrier(); }, "afterwards"), {"unusable since", message});
    ++gave_up;
  });
}

TEST(comm_errors, a_rank_that_dies_is_named_by_all) {
  for (int world = 2; world <= 5; ++world) {
    std::atomic<int> survivors{world - 1};
    run_world(world, small_slots(), [&survivors](Rank& self) {
      self.comm->barrier().wait();
      const int dead = self.world - 1;
      if (self.rank == dead) {
        self.mesh->drop_dead();
        // A dead rank closes nothing: its communicator must not report a goodbye before the others saw the sockets end.
        while (survivors > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      struct Leaving {
        std::atomic<int>& count;
        ~Leaving() { --count; }
      } const leaving{survivors};
      std::vector<float> values(10000);
      const Buffer buffer{values.data(), values.size()};
      const auto start = std::chrono::steady_clock::now();
      for (int call = 0; call < 2; ++call) {
        try {
          for (;;) self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum).wait();
        } catch (const PeerLost& lost) {
          EXPECT_EQ(lost.rank, dead);
          expect_contains(lost.what(), {"rank " + std::to_string(dead) + " died"});
          if (call == 1) expect_contains(lost.what(), {"unusable since"});
        }
      }
      EXPECT_LT(seconds_since(start), 15.0);  // far from the deadline of 30 s
    });
  }
}

TEST(comm_errors, dying_amid_a_stream_of_operations) {
  run_world(4, small_slots(), [](Rank& self) {
    std::vector<float> values(200000);
    const Buffer buffer{values.data(), values.size()};
    std::vector<Work> works;
    for (int i = 0; i < 30; ++i) works.push_back(self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum));
    works[2].wait();
    if (self.rank == 0) {
      self.mesh->drop_dead();
      self.comm->close();  // its thread would continue otherwise; a dead process has none
      return;
    }
    int lost = 0;
    for (Work& work : works) {
      try {
        work.wait();
      } catch (const PeerLost& error) {
        EXPECT_EQ(error.rank, 0);
        ++lost;
      }
    }
    EXPECT_GE(lost, 0);
    EXPECT_THROW(self.comm->barrier().wait(), PeerLost);
  });
}

TEST(comm_errors, leaving_hurts_only_who_waits) {
  run_world(3, small_slots(), [](Rank& self) {
    self.comm->barrier().wait();
    if (self.rank == 2) {
      self.comm->close();
      self.mesh->leave();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    try {
      self.comm->barrier("needs all").wait();
      fail(__FILE__, __LINE__, "the barrier passed without rank 2");
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.rank, 2);
      expect_contains(lost.what(), {"rank 2 left", "needs all"});
    }
  });
}

TEST(comm_errors, mesh_goodbye_without_close) {
  run_world(2, small_slots(), [](Rank& self) {
    self.comm->barrier().wait();
    if (self.rank == 1) return self.mesh->leave();
    EXPECT_THROW_WITH(self.comm->barrier("x").wait(), PeerLost, "rank 1 left");
  });
}

TEST(comm_errors, refused_memory_is_refused_everywhere_and_harms_nothing) {
  run_world(2, small_slots(), [](Rank& self) {
    EXPECT_THROW_WITH(self.comm->allocate(std::size_t{1} << 62), SystemError, "");
    EXPECT_THROW_WITH(self.comm->allocate_shared(std::size_t{1} << 62), SystemError, "");
    self.comm->barrier().wait();
    EXPECT_EQ(self.comm->memory().symmetric_nbytes, 0u);
  });
}
