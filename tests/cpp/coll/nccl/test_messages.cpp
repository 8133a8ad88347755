// Backend nccl: send and recv of device memory. Each pair and direction has a communicator of NCCL.
#include <deque>
#include <future>
#include <numeric>

#include "coll/support/error_checks.hpp"
#include "coll/support/nccl_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace messages_by_nccl {
namespace {

using Ints = std::vector<std::int32_t>;
constexpr std::size_t kLarge = 20000;  // more than a slot

NcclWorldOptions with_messages(double timeout_s = 30, double max_delay_s = 0) {
  return {.timeout_s = timeout_s, .max_delay_s = max_delay_s, .messages = true};
}

Call on(device::Stream& stream, bool async) {
  Call call("", async);
  call.stream = handle_of(stream);
  return call;
}

Work send(NcclRank& self, const Ints& values, int dst, int tag = 0, const Call& call = {}) {
  const ConstBuffer buffer{values.data(), values.size()};
  return self.comm->send({&buffer, 1}, DType::int32, dst, tag, call);
}

Work recv(NcclRank& self, Ints& values, int src, int tag = 0, const Call& call = {}, int* source = nullptr) {
  const Buffer buffer{values.data(), values.size()};
  return self.comm->recv({&buffer, 1}, DType::int32, src, tag, call, source);
}

Ints numbers(std::size_t count, int first) {
  Ints values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

}  // namespace

TEST(nccl_messages, around_a_ring_of_ranks_that_all_send_first) {
  for (const int queries : {0, 3}) {
    FakeNccl fake;
    fake.be_slow(queries);
    run_nccl_world(4, with_messages(30, 100e-6), [](NcclRank& self) {
      auto stream = self.device->make_stream();
      const int right = (self.rank + 1) % 4, left = (self.rank + 3) % 4;
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, kLarge}) {
        const Ints mine = numbers(count, 100 * self.rank), theirs = numbers(count, 100 * left);
        Ints got(count, -1), result(count, -1);
        Work sending = send(self, mine, right, static_cast<int>(count % 7), on(*stream, true));
        recv(self, got, left, static_cast<int>(count % 7), on(*stream, false));
        if (count > 0) stream->copy(result.data(), got.data(), count * sizeof(std::int32_t));
        sending.wait();
        stream->synchronize();
        EXPECT_TRUE(result == theirs);
      }
    });
  }
}

TEST(nccl_messages, small_ones_leave_before_they_are_asked_for) {
  FakeNccl fake;
  run_nccl_world(2, with_messages(), [](NcclRank& self) {
    auto stream = self.device->make_stream();
    Ints mine = numbers(100, self.rank), got(100, -1);
    send(self, mine, 1 - self.rank, 0, on(*stream, false));  // both ranks, and neither waits
    stream->fill(mine.data(), 0xee, 400);                    // it has been read
    recv(self, got, 1 - self.rank, 0, on(*stream, false));
    stream->synchronize();
    EXPECT_TRUE(got == numbers(100, 1 - self.rank));
  });
}

TEST(nccl_messages, batches_in_both_directions_match_by_tag_and_in_call_order) {
  FakeNccl fake;
  run_nccl_world(3, with_messages(30, 100e-6), [](NcclRank& self) {
    auto stream = self.device->make_stream();
    std::deque<Ints> mine, got;
    std::deque<int> sources;
    std::vector<Work> works;
    for (int turn = 0; turn < 12; ++turn)
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == self.rank) continue;
        const std::size_t count = turn % 3 == 0 ? kLarge : 50;
        mine.push_back(numbers(count, 1000 * turn + 10 * self.rank + peer));
        got.emplace_back(count, -1);
        works.push_back(send(self, mine.back(), peer, turn % 2, on(*stream, true)));
        works.push_back(recv(self, got.back(), peer, turn % 2, on(*stream, true), &sources.emplace_back(-1)));
      }
    for (Work& work : works) work.wait();
    stream->synchronize();
    std::size_t at = 0;
    for (int turn = 0; turn < 12; ++turn)
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == self.rank) continue;
        EXPECT_EQ(sources[at], peer);
        EXPECT_TRUE(got[at] == numbers(got[at].size(), 1000 * turn + 10 * peer + self.rank));
        ++at;
      }
  });
}

TEST(nccl_messages, lists_may_be_cut_differently_on_both_sides) {
  FakeNccl fake;
  run_nccl_world(2, with_messages(30, 100e-6), [](NcclRank& self) {
    auto stream = self.device->make_stream();
    Ints all = self.rank == 0 ? numbers(kLarge, 5) : Ints(kLarge, -1);
    if (self.rank == 0) {
      const ConstBuffer pieces[] = {{all.data(), 3}, {all.data(), 0}, {all.data() + 3, kLarge - 3}};
      self.comm->send(pieces, DType::int32, 1, 0, on(*stream, true)).wait();
    } else {
      const Buffer pieces[] = {{all.data(), kLarge / 2}, {all.data() + kLarge / 2, kLarge / 2}};
      self.comm->recv(pieces, DType::int32, -1, 0, on(*stream, true)).wait();
    }
    stream->synchronize();
    EXPECT_TRUE(all == numbers(kLarge, 5));
  });
}

TEST(nccl_messages, any_rank) {
  FakeNccl fake;
  run_nccl_world(4, with_messages(), [](NcclRank& self) {
    Ints values(kLarge, self.rank);
    if (self.rank != 0) return send(self, values, 0, 5).wait();
    int sum = 0;
    for (int turn = 1; turn < 4; ++turn) {
      int source = -1;
      recv(self, values, -1, 5, {}, &source).wait();
      EXPECT_EQ(values[kLarge - 1], source);
      sum += source;
    }
    EXPECT_EQ(sum, 6);
  });
}

/// A message is on streams of its own: a collective that waits for other ranks does not hold it back.
TEST(nccl_messages, they_pass_collectives) {
  FakeNccl fake;
  run_nccl_world(3, with_messages(), [](NcclRank& self) {
    std::vector<float> values(100, 1);
    Ints numbers(kLarge, self.rank);
    Work summing;
    if (self.rank != 2) summing = sum(self, values);
    if (self.rank == 0) send(self, numbers, 1).wait();
    if (self.rank == 1) {
      auto stream = self.device->make_stream();
      recv(self, numbers, 0, 0, on(*stream, false));
      stream->synchronize();
      EXPECT_EQ(numbers[0], 0);
      send(self, numbers, 2).wait();
    }
    if (self.rank == 2) {
      recv(self, numbers, 1).wait();
      summing = sum(self, values);
    }
    summing.wait();
    EXPECT_EQ(values[99], 3.0f);
  });
}

TEST(nccl_messages, sides_that_differ_are_named_and_the_rest_goes_on) {
  FakeNccl fake;
  run_nccl_world(2, with_messages(), [](NcclRank& self) {
    for (const std::size_t count : {std::size_t{100}, kLarge}) {
      Ints values(count + 1, self.rank);
      const auto differ = [&] {
        if (self.rank == 1) return recv(self, values, 0).wait();
        values.pop_back();
        send(self, values, 1).wait();
        Ints other(1);  // the small one has ended for its caller
        recv(self, other, 1, 77).wait();
      };
      expect_contains(message_of<CollectiveMismatch>(differ, "differ"),
                      {"rank 0 sent int32 count=" + std::to_string(count) + " to rank 1",
                       "called recv for int32 count=" + std::to_string(count + 1)});
      Ints good(count, self.rank);
      if (self.rank == 0)
        send(self, good, 1, 3).wait();
      else
        recv(self, good, 0, 3).wait();
      EXPECT_EQ(good[0], 0);
    }
  });
}

TEST(nccl_messages, one_that_finds_no_counterpart_fails_alone_at_its_deadline) {
  FakeNccl fake;
  run_nccl_world(2, with_messages(0.3), [](NcclRank& self) {
    Ints values(kLarge, self.rank);
    if (self.rank == 0) {
      EXPECT_THROW_WITH(send(self, values, 1, 1).wait(), Timeout, "send to rank 1, tag 1, int32 count=20000");
      EXPECT_THROW_WITH(recv(self, values, 1, 2).wait(), Timeout, "recv from rank 1, tag 2");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(self.rank == 0 ? 0 : 650));
    self.comm->barrier().wait();
    self.comm->suspend_deadline();
    if (self.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    if (self.rank == 0)
      send(self, values, 1).wait();
    else
      recv(self, values, 0).wait();
    self.comm->resume_deadline();
    EXPECT_EQ(values[0], 0);
  });
}

TEST(nccl_messages, a_small_one_waits_as_long_as_its_receiver_likes) {
  FakeNccl fake;
  run_nccl_world(2, with_messages(0.3), [](NcclRank& self) {
    Ints values(100, self.rank);
    if (self.rank == 0) {
      send(self, values, 1).wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      recv(self, values, 0).wait();
    }
    EXPECT_EQ(values[0], 0);
  });
}

TEST(nccl_messages, one_on_the_device_that_does_not_end_is_named_on_both_sides) {
  FakeNccl fake;
  fake.hold_kernels(0);
  run_nccl_world(2, with_messages(0.4), [](NcclRank& self) {
    auto stream = self.device->make_stream();
    Ints values(kLarge, self.rank);
    const auto message = [&] {
      const Call call = on(*stream, true);
      Work work = self.rank == 0 ? send(self, values, 1, 0, call) : recv(self, values, 0, 0, call);
      work.wait_on(0);
    };
    try {
      message();
      fail(__FILE__, __LINE__, "it ended");
    } catch (const Error& error) {
      expect_contains(error.what(), {"was not complete within 0.4 s", "rank"});
    }
  });
}

TEST(nccl_messages, a_rank_that_dies) {
  for (const bool granted : {false, true}) {
    FakeNccl fake;
    if (granted) fake.hold_kernels(1);
    std::promise<void> seen;
    std::unique_ptr<device::Stream> stream;  // of rank 1; it ends after its communicator
    run_nccl_world(3, with_messages(), [&](NcclRank& self) {
      Ints values(kLarge, self.rank);
      if (self.rank == 1) {
        stream = self.device->make_stream();
        if (granted) send(self, values, 0, 0, on(*stream, true)).wait_for(5);
        self.mesh->drop_dead();
        return seen.get_future().wait();
      }
      if (self.rank == 2) {
        if (!granted) expect_lost(1, "died", [&] { recv(self, values, -1).wait(); });
        return;
      }
      expect_lost(1, "died", [&] { recv(self, values, 1).wait_on(0); });
      expect_lost(1, "died", [&] { send(self, values, 1).wait_on(0); });
      seen.set_value();
    });
  }
}

TEST(nccl_messages, a_rank_that_closes_is_named) {
  FakeNccl fake;
  std::promise<void> seen;
  run_nccl_world(2, with_messages(), [&](NcclRank& self) {
    Ints values(kLarge, self.rank);
    if (self.rank == 1) {
      send(self, values, 0).wait();
      self.comm->close();
      self.mesh->leave();
      return seen.get_future().wait();
    }
    auto stream = self.device->make_stream();
    recv(self, values, 1, 0, on(*stream, false));
    stream->synchronize();
    EXPECT_EQ(values[0], 1);
    expect_lost(1, "left", [&] { recv(self, values, 1).wait(); });
    seen.set_value();
  });
}

TEST(nccl_messages, what_nccl_refuses_is_told_and_the_next_message_has_another_channel) {
  for (const std::string call : {"ncclCommInitRankConfig", "ncclSend"}) {
    FakeNccl fake;
    run_nccl_world(2, with_messages(), [&](NcclRank& self) {
      Ints values(kLarge, self.rank);
      if (self.rank == 0) fake.fail(0, call, FakeNccl::system_error);
      self.comm->barrier().wait();
      const auto message = [&] {
        Work work = self.rank == 0 ? send(self, values, 1) : recv(self, values, 0);
        work.wait_on(0);
      };
      if (self.rank == 0)
        expect_contains(message_of<CudaError>(message, call.c_str()), {call, "unhandled system error"});
      else
        EXPECT_THROW_WITH(message(), Error, "messages with rank 0 have failed there");
      self.comm->barrier().wait();
      message();
      EXPECT_EQ(values[0], 0);
    });
  }
}

TEST(nccl_messages, a_communicator_without_them_says_so) {
  FakeNccl fake;
  run_nccl_world(2, {}, [](NcclRank& self) {
    Ints values(1);
    EXPECT_THROW_WITH(send(self, values, 1 - self.rank), Unsupported, "without messages");
  });
}

}  // namespace messages_by_nccl
