// Communicators over links: mismatches, late ranks, lost ranks, garbage, and the errors of later calls.
#include <netinet/tcp.h>

#include <chrono>
#include <mutex>
#include <random>

#include "coll/support/error_checks.hpp"
#include "coll/support/tcp_world.hpp"

using namespace zcomm;
using namespace zcomm::test;
using namespace zcomm::test::calls;

namespace {

void expect_mismatch(int odd, const CommCall& usual, const CommCall& other, std::initializer_list<std::string> parts) {
  const auto run = [](const std::function<void(Rank&)>& body) { run_link_world(3, {}, body); };
  test::expect_mismatch(run, odd, usual, other, parts);
}

TcpWorld with_timeout(double timeout_s) {
  TcpWorld with;
  with.options.timeout_s = timeout_s;
  return with;
}

/// Both ranks of `cables`, as threads.
void run_two(Cables& cables, const std::function<void(int, Communicator&)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      auto mesh = cables.adopt(r);
      auto comm = cables.create(mesh, {20, 1024});
      body(r, *comm);
      comm->close();
      mesh->leave();
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

TEST(tcp_errors, mismatch_names_both_sides) {
  expect_mismatch(
      1, all_reduce(1024), all_reduce(2048),
      {"rank 0, 2: all_reduce float32 sum count=1024 'g'", "rank 1: all_reduce float32 sum count=2048 'g'"});
  expect_mismatch(0, all_reduce(60000), all_reduce(60000, DType::int32),
                  {"rank 0: all_reduce int32", "rank 1, 2: all_reduce float32"});
  expect_mismatch(2, all_reduce(64), all_reduce(60000), {"count=64", "rank 2: all_reduce float32 sum count=60000"});
  expect_mismatch(2, all_reduce(64), all_reduce(64, DType::float32, ReduceOp::max),
                  {" sum ", "rank 2: all_reduce float32 max"});
  expect_mismatch(2, all_reduce(64), all_reduce(64, DType::float32, ReduceOp::sum, "h"), {"'g'", "'h'"});
  expect_mismatch(1, all_reduce(64), [](Communicator& comm) { comm.barrier("b").wait(); }, {"rank 1: barrier 'b'"});
  expect_mismatch(1, all_reduce_list({10, 20}), all_reduce_list({20, 10}), {"[10, 20]", "[20, 10]"});
  expect_mismatch(1, all_reduce_list({1, 1, 1, 1, 3, 2}), all_reduce_list({1, 1, 1, 1, 2, 3}), {"layout"});
  expect_mismatch(1, reduce_scatter(DType::bfloat16, false), reduce_scatter(DType::float32, false),
                  {"bfloat16 -> float32"});
  expect_mismatch(1, reduce_scatter(DType::float32, false), reduce_scatter(DType::float32, true), {"accumulate"});
  expect_mismatch(1, broadcast(0), broadcast(1), {"root=0", "root=1"});
  expect_mismatch(
      1, [](Communicator& comm) { comm.allocate(100); }, [](Communicator& comm) { comm.allocate(200); },
      {"allocate nbytes=100", "allocate nbytes=200"});
  expect_mismatch(2, [](Communicator& comm) { comm.duplicate(); }, all_reduce(1), {"rank 0, 1: duplicate"});
}

TEST(tcp_errors, all_to_all_counts_are_compared) {
  run_link_world(3, {}, [](Rank& self) {
    std::vector<ConstBuffer> in(3, ConstBuffer{data, 4});
    std::vector<Buffer> out = buffers_at(data + 4096 + 256 * self.rank, 3, 4);
    if (self.rank == 2) out[1].count = 5;
    expect_contains(
        message_of<CollectiveMismatch>([&] { self.comm->all_to_all(in, out, DType::float32).wait(); }, "all_to_all"),
        {"rank 1 sends 4 elements to rank 2, which expects 5"});
  });
}

TEST(tcp_errors, late_rank_is_named_by_all) {
  for (const std::size_t count : {std::size_t{16}, std::size_t{60000}}) {
    std::atomic<int> gave_up{0};
    run_link_world(4, with_timeout(0.3), [&](Rank& self) {
      self.comm->barrier("first").wait();
      if (self.rank == 1) {
        while (gave_up < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        expect_contains(message_of<Timeout>([&] { self.comm->barrier("late").wait(); }, "late"), {"rank 1"});
        return;
      }
      std::vector<float> own(count);
      const Buffer buffer{own.data(), count};
      const std::string message = message_of<Timeout>(
          [&] {
            self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, {"grad.7", true, "train.py:42"}).wait();
          },
          "timeout");
      expect_contains(message, {"'grad.7' at train.py:42 (operation 2)", "for rank 1 to enter it",
                                "rank 1 last entered operation 1, barrier 'first'"});
      expect_contains(message_of<Timeout>([&] { self.comm->barrier(); }, "afterwards"), {"unusable since", message});
      ++gave_up;
    });
  }
}

TEST(tcp_errors, a_suspended_deadline_waits) {
  run_link_world(3, with_timeout(0.2), [&](Rank& self) {
    if (self.rank == 0) {
      self.comm->suspend_deadline();
      std::this_thread::sleep_for(std::chrono::milliseconds(900));
    }
    self.comm->barrier().wait();
    if (self.rank == 0) self.comm->resume_deadline();
    self.comm->barrier().wait();
  });
}

TEST(tcp_errors, a_rank_that_dies_is_named_by_all) {
  for (const Wire wire : {Wire::unix_, Wire::tcp}) {
    for (int world = 2; world <= 5; ++world) {
      TcpWorld with;
      with.wire = wire;
      std::atomic<int> survivors{world - 1};
      run_link_world(world, with, [&survivors](Rank& self) {
        const int dead = self.world - 1;
        if (self.rank == dead) {
          self.comm->barrier().wait();
          self.mesh->drop_dead();
          while (survivors > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          return;
        }
        struct Leaving {
          std::atomic<int>& count;
          ~Leaving() { --count; }
        } const leaving{survivors};
        std::vector<float> values(100000);
        const Buffer buffer{values.data(), values.size()};
        for (int call = 0; call < 2; ++call) {
          try {
            if (call == 0) self.comm->barrier().wait();
            for (;;) self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum).wait();
          } catch (const PeerLost& lost) {
            EXPECT_EQ(lost.rank, dead);
            expect_contains(lost.what(), {"rank " + std::to_string(dead) + " died"});
            if (call == 1) expect_contains(lost.what(), {"unusable since"});
          }
        }
      });
    }
  }
}

TEST(tcp_errors, leaving_hurts_only_who_waits) {
  run_link_world(3, {}, [](Rank& self) {
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

TEST(tcp_errors, close_ends_what_runs) {
  run_link_world(2, {}, [](Rank& self) {
    if (self.rank == 1) {
      message_of<PeerLost>([&] { self.comm->barrier().wait(), self.comm->barrier().wait(); }, "other side");
      return;
    }
    self.comm->barrier().wait();
    Work work = self.comm->recv(std::vector<Buffer>{{data, 4}}, DType::float32, 1, 0, "never");
    self.comm->close();
    EXPECT_THROW_WITH(work.wait(), Error, "closed");
    EXPECT_THROW_WITH(self.comm->barrier(), Error, "closed");
  });
}

/// In place of rank 2 a stranger writes `bytes` to all of rank 0's and 1's sockets of the given index.
void expect_garbage_noticed(std::size_t socket, const std::vector<std::byte>& bytes) {
  Cables cables(3, 3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      try {
        auto mesh = cables.adopt(r);
        if (r == 2) {
          auto copies = std::vector<UniqueFd>();
          for (int peer = 0; peer < 2; ++peer)
            copies.emplace_back(::dup(cables.links[2][static_cast<std::size_t>(peer)][socket].get()));
          auto comm = cables.create(mesh, {20, 1024});
          comm->barrier().wait();
          for (const UniqueFd& copy : copies) {
            // The peers may have closed their ends by now, which must not raise SIGPIPE.
            [[maybe_unused]] const auto sent = ::send(copy.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
          }
          EXPECT_THROW(comm->barrier("x").wait(), Error);
          comm->close();
          return mesh->leave();
        }
        auto comm = cables.create(mesh, {20, 1024});
        std::vector<float> values(100000);
        const Buffer buffer{values.data(), values.size()};
        EXPECT_THROW(
            {
              comm->barrier().wait();  // rank 2 may have left it already
              for (;;) comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, "x").wait();
            },
            Error);
        comm->close();
        mesh->leave();
      } catch (const std::exception& error) {
        fail(__FILE__, __LINE__, "rank " + std::to_string(r) + ": " + error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(tcp_errors, garbage_is_an_error) {
  std::mt19937 engine(1);
  for (const std::size_t socket : {0, 1, 2}) {
    for (int round = 0; round < 3; ++round) {
      std::vector<std::byte> bytes(300);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine());
      if (socket == 2) continue;  // no rank reads there before the ring, which the stranger's mismatch prevents
      expect_garbage_noticed(socket, bytes);
    }
  }
}

TEST(tcp_errors, bad_links_are_refused) {
  const auto attempt = [](std::size_t count, int spare) {
    Cables cables(2, count);
    auto mesh = cables.adopt(0);
    if (spare >= 0) cables.links[0][static_cast<std::size_t>(spare)].emplace_back();
    cables.create(mesh, {1, 1024});
  };
  EXPECT_THROW_WITH(attempt(1, -1), InvalidArgument, "at least two");
  EXPECT_THROW_WITH(attempt(2, 1), InvalidArgument, "is not an open descriptor");
  EXPECT_THROW_WITH(attempt(2, 0), InvalidArgument, "needs 0");
  EXPECT_THROW_WITH(attempt(2, -1), Timeout, "rank 1 does not answer");  // no such rank exists
}

TEST(tcp_errors, different_options_are_a_mismatch) {
  Cables cables(2, 2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      auto mesh = cables.adopt(r);
      EXPECT_THROW_WITH(cables.create(mesh, {20, r == 0 ? std::size_t{1024} : std::size_t{2048}}), CollectiveMismatch,
                        "segment_nbytes");
      mesh->leave();
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(tcp_errors, links_do_not_delay_small_messages) {
  Cables cables(2, 3, Wire::tcp);
  std::vector<int> numbers;
  for (const UniqueFd& socket : cables.links[0][1]) numbers.push_back(socket.get());
  run_two(cables, [&](int rank, Communicator&) {
    if (rank != 0) return;
    for (const int socket : numbers) {
      int value = 0;
      socklen_t nbytes = sizeof value;
      EXPECT_EQ(::getsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &value, &nbytes), 0);
      EXPECT_NE(value, 0);
    }
  });
}
