// send and recv over links: order, tags, any source, both ways at once, mismatches, deadlines.
#include <atomic>
#include <chrono>
#include <numeric>

#include "coll/support/tcp_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

void send(Communicator& comm, const std::vector<float>& values, int dst, int tag) {
  const ConstBuffer buffer{values.data(), values.size()};
  comm.send({&buffer, 1}, DType::float32, dst, tag, kBlocking);
}

std::vector<float> recv(Communicator& comm, std::size_t count, int src, int tag, int* source = nullptr) {
  std::vector<float> values(count);
  const Buffer buffer{values.data(), count};
  comm.recv({&buffer, 1}, DType::float32, src, tag, kBlocking, source);
  return values;
}

std::vector<float> numbers(std::size_t count, float first) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

constexpr std::size_t kCounts[] = {0, 1, 100, 5000, 300'000};  // small and announced

}  // namespace

TEST(tcp_messages, arrive_in_order_and_by_tag) {
  for (const Wire wire : {Wire::unix_, Wire::tcp}) {
    TcpWorld with;
    with.wire = wire;
    run_link_world(2, with, [](Rank& self) {
      if (self.rank == 0) {
        for (const std::size_t count : kCounts) send(*self.comm, numbers(count, 1), 1, 7);
        Work big;  // announced, so asynchronous: it is asked for after the small one
        const auto values = numbers(100'000, 5);
        const ConstBuffer buffer{values.data(), values.size()};
        big = self.comm->send({&buffer, 1}, DType::float32, 1, 1, "big");
        send(*self.comm, {2.0f}, 1, 2);
        big.wait();
      } else {
        for (const std::size_t count : kCounts) EXPECT_TRUE(recv(*self.comm, count, 0, 7) == numbers(count, 1));
        EXPECT_TRUE(recv(*self.comm, 1, 0, 2) == std::vector<float>{2.0f});
        EXPECT_TRUE(recv(*self.comm, 100'000, 0, 1) == numbers(100'000, 5));
      }
    });
  }
}

TEST(tcp_messages, both_ways_at_once_and_beside_collectives) {
  run_link_world(4, {}, [](Rank& self) {
    for (const std::size_t count : kCounts) {
      const int next = (self.rank + 1) % self.world, last = (self.rank + self.world - 1) % self.world;
      const auto values = numbers(count, static_cast<float>(self.rank));
      std::vector<float> got(count), sum(1000, 1.0f);
      const ConstBuffer out{values.data(), count};
      const Buffer in{got.data(), count}, all{sum.data(), sum.size()};
      Work sent = self.comm->send({&out, 1}, DType::float32, next, 3, "ring");
      self.comm->all_reduce({&all, 1}, DType::float32, ReduceOp::sum).wait();
      Work received = self.comm->recv({&in, 1}, DType::float32, last, 3, "ring");
      received.wait();
      sent.wait();
      EXPECT_TRUE(got == numbers(count, static_cast<float>(last)));
      EXPECT_EQ(sum[0], 4.0f);
    }
  });
}

TEST(tcp_messages, from_any_rank) {
  run_link_world(4, {}, [](Rank& self) {
    for (const std::size_t count : {std::size_t{3}, std::size_t{50'000}}) {
      if (self.rank != 0) {
        send(*self.comm, numbers(count, static_cast<float>(self.rank)), 0, static_cast<int>(count));
        continue;
      }
      int seen = 0;
      for (int i = 1; i < 4; ++i) {
        int source = -1;
        const auto values = recv(*self.comm, count, -1, static_cast<int>(count), &source);
        EXPECT_TRUE(source > 0 && values == numbers(count, static_cast<float>(source)));
        seen |= 1 << source;
      }
      EXPECT_EQ(seen, 14);
    }
    self.comm->barrier().wait();
  });
}

TEST(tcp_messages, more_small_ones_than_a_peer_keeps) {
  run_link_world(2, {}, [](Rank& self) {
    constexpr int messages = 300;  // of 16 KiB: more than the credit
    std::vector<Work> works;
    const auto values = numbers(4096, 0);
    for (int i = 0; i < messages; ++i) {
      if (self.rank == 0) {
        const ConstBuffer buffer{values.data(), values.size()};
        works.push_back(self.comm->send({&buffer, 1}, DType::float32, 1, i, "many"));
      }
    }
    self.comm->barrier().wait();
    for (int i = messages - 1; i >= 0 && self.rank == 1; --i) EXPECT_TRUE(recv(*self.comm, 4096, 0, i) == values);
    for (Work& work : works) work.wait();
  });
}

TEST(tcp_messages, both_sides_see_a_mismatch) {
  run_link_world(2, {}, [](Rank& self) {
    if (self.rank == 0)
      EXPECT_THROW_WITH(send(*self.comm, numbers(50'000, 0), 1, 4), CollectiveMismatch,
                        "rank 0 sent float32 count=50000 to rank 1 with tag 4, which called recv for float32 count=7");
    else
      EXPECT_THROW_WITH(recv(*self.comm, 7, 0, 4), CollectiveMismatch, "count=50000");
    Call complex;
    complex.element = "complex64";
    std::vector<float> data(50'000);
    const ConstBuffer in{data.data(), data.size()};
    const Buffer out{data.data(), data.size()};
    if (self.rank == 0)
      EXPECT_THROW_WITH(self.comm->send({&in, 1}, DType::float32, 1, 3, complex).wait(), CollectiveMismatch,
                        "float32 (complex64) count=50000");
    else
      EXPECT_THROW_WITH(self.comm->recv({&out, 1}, DType::float32, 0, 3).wait(), CollectiveMismatch,
                        "float32 (complex64) count=50000");
    self.comm->barrier().wait();  // only the messages failed
    if (self.rank == 0) {
      send(*self.comm, {1.0f}, 1, 5);  // done before it is asked for
      self.comm->barrier().wait();
      EXPECT_THROW_WITH(
          {
            for (;;) send(*self.comm, {1.0f}, 1, 6);
          },
          CollectiveMismatch, "with tag 5");
    } else {
      self.comm->barrier().wait();
      EXPECT_THROW_WITH(recv(*self.comm, 2, 0, 5), CollectiveMismatch, "count=2");
    }
    self.comm->barrier().wait();
    if (self.rank == 0) {
      send(*self.comm, {1.0f}, 1, 7);
      EXPECT_THROW_WITH(recv(*self.comm, 1, 1, 8), CollectiveMismatch, "with tag 7");  // which never comes
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that the other side usually waits already
      EXPECT_THROW_WITH(recv(*self.comm, 3, 0, 7), CollectiveMismatch, "count=3");
    }
    self.comm->barrier().wait();
  });
}

TEST(tcp_messages, many_that_no_recv_has_asked_for_hold_up_no_other) {
  TcpWorld with;
  with.options.timeout_s = 10;
  run_link_world(2, with, [](Rank& self) {
    constexpr int kMany = kSanitized ? 20'000 : 200'000;  // a scan of all of them for each would pass the deadline
    if (self.rank == 0) {
      for (int i = 0; i < kMany; ++i) send(*self.comm, {static_cast<float>(i)}, 1, 6);
      send(*self.comm, {7.0f}, 1, 7);
    } else {
      EXPECT_TRUE(recv(*self.comm, 1, 0, 7) == std::vector<float>{7.0f});
      EXPECT_TRUE(recv(*self.comm, 1, 0, 6) == std::vector<float>{0.0f});
      EXPECT_TRUE(recv(*self.comm, 1, 0, 6) == std::vector<float>{1.0f});
    }
    self.comm->barrier().wait();
  });
}

TEST(tcp_messages, deadline_and_loss) {
  TcpWorld with;
  with.options.timeout_s = 0.2;
  run_link_world(2, with, [](Rank& self) {
    if (self.rank == 0) {
      EXPECT_THROW_WITH(recv(*self.comm, 4, 1, 9), Timeout, "recv from rank 1, tag 9, float32 count=4");
      EXPECT_THROW_WITH(send(*self.comm, numbers(50'000, 0), 1, 9), Timeout, "send to rank 1");
      const Buffer none{nullptr, 0};
      Work pending = self.comm->recv({&none, 1}, DType::float32, 1, 2, "lost");
      self.comm->send({}, DType::uint8, 1, 1, kBlocking);
      EXPECT_THROW_WITH(pending.wait(), PeerLost, "rank 1");
    } else {
      const auto patient = [&] {
        for (int i = 0; i < 100; ++i) {
          try {
            return self.comm->recv({}, DType::uint8, 0, 1, kBlocking);
          } catch (const Timeout&) {
          }
        }
        throw Error("nothing came");
      };
      patient();
    }
  });
}
