// Backend nccl and streams: each missing wait is a wrong number, for the streams run when they like.
#include <atomic>
#include <deque>
#include <future>
#include <optional>

#include "coll/support/nccl_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr std::size_t kCount = 300;
using Ints = std::vector<std::int64_t>;

Call on(device::Stream& stream, bool async) {
  Call call("", async);
  call.stream = handle_of(stream);
  return call;
}

Work sum(NcclRank& self, Ints& values, const Call& call) {
  const Buffer buffer{values.data(), values.size()};
  return self.comm->all_reduce({&buffer, 1}, DType::int64, ReduceOp::sum, call);
}

/// While it lives, the stream does not get past it.
class Gate {
 public:
  explicit Gate(device::Stream& stream) {
    put(stream, [opened = opened_.get_future().share()] { opened.wait(); });
  }
  ~Gate() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

}  // namespace

TEST(nccl_order, inputs_come_from_and_results_go_to_the_callers_stream) {
  for (const int queries : {0, 2})
    for (const bool async : {false, true}) {
      FakeNccl fake;
      fake.be_slow(queries);
      run_nccl_world(3, {.max_delay_s = 200e-6}, [=](NcclRank& self) {
        auto stream = self.device->make_stream();
        Ints x(kCount);
        std::deque<Ints> inputs, results;  // live until the stream is done with them
        for (int i = 0; i < 8; ++i) {
          inputs.emplace_back(kCount, 10 * i + self.rank);
          stream->copy(x.data(), inputs.back().data(), kCount * 8);  // over the last operation's result
          Work work = sum(self, x, on(*stream, async));
          if (i % 3 != 2) work.wait();  // else dropping it orders the stream
          work = Work();
          results.emplace_back(kCount, -1);
          stream->copy(results.back().data(), x.data(), kCount * 8);
        }
        stream->synchronize();
        for (int i = 0; i < 8; ++i) EXPECT_TRUE(results[static_cast<std::size_t>(i)] == Ints(kCount, 30 * i + 3));
      });
    }
}

TEST(nccl_order, many_in_flight_on_several_streams) {
  FakeNccl fake;
  run_nccl_world(2, {.max_delay_s = 100e-6}, [](NcclRank& self) {
    constexpr int kTurns = 30;
    auto a = self.device->make_stream(), b = self.device->make_stream(), out = self.device->make_stream();
    std::deque<Ints> inputs, tensors, results;
    std::vector<Work> works;
    for (int i = 0; i < kTurns; ++i) {
      device::Stream& stream = i % 2 == 0 ? *a : *b;
      inputs.emplace_back(kCount, i + self.rank);
      tensors.emplace_back(kCount, -1);
      stream.copy(tensors.back().data(), inputs.back().data(), kCount * 8);
      works.push_back(sum(self, tensors.back(), on(stream, true)));
    }
    for (int i = kTurns - 1; i >= 0; --i) {
      const auto k = static_cast<std::size_t>(i);
      works[k].wait_on(handle_of(*out));  // another stream than the call's
      results.emplace_back(kCount, -1);
      out->copy(results.back().data(), tensors[k].data(), kCount * 8);
    }
    out->synchronize();
    for (const Work& work : works) EXPECT_TRUE(work.done());
    for (int i = 0; i < kTurns; ++i)
      EXPECT_TRUE(results[static_cast<std::size_t>(kTurns - 1 - i)] == Ints(kCount, 2 * i + 1));
  });
}

TEST(nccl_order, it_waits_for_a_stream_that_is_late) {
  FakeNccl fake;
  std::promise<void> seen;
  run_nccl_world(2, {}, [&](NcclRank& self) {
    auto stream = self.device->make_stream();
    Ints x(kCount, -1);
    const Ints input(kCount, self.rank + 1);
    std::optional<Gate> gate;
    if (self.rank == 1) gate.emplace(*stream);
    stream->copy(x.data(), input.data(), kCount * 8);
    Work work = sum(self, x, on(*stream, true));
    if (self.rank == 0) {
      fake.wait_for_kernel(0);        // which waits for rank 1's
      EXPECT_TRUE(work.wait_for(5));  // its end on the host
      EXPECT_FALSE(work.done());
      seen.set_value();
    } else {
      seen.get_future().wait();
      EXPECT_FALSE(work.done());
      gate.reset();
    }
    work.wait();
    stream->synchronize();
    EXPECT_TRUE(x == Ints(kCount, 3));
  });
}

/// Of the hosts, and of the streams.
TEST(nccl_order, a_barrier_orders_streams_of_all_ranks) {
  FakeNccl fake;
  std::atomic<int> before{0};
  run_nccl_world(3, {.max_delay_s = 200e-6}, [&](NcclRank& self) {
    auto stream = self.device->make_stream();
    int seen = 0;
    put(*stream, [&] { ++before; });
    self.comm->barrier(on(*stream, false));
    put(*stream, [&] { seen = before; });
    stream->synchronize();
    EXPECT_EQ(seen, 3);
  });
}

TEST(nccl_order, inputs_may_be_overwritten_after_the_end) {
  FakeNccl fake;
  run_nccl_world(3, {.max_delay_s = 100e-6}, [](NcclRank& self) {
    auto stream = self.device->make_stream();
    Ints part(kCount), whole(3 * kCount);
    std::deque<Ints> inputs, results;
    for (int i = 0; i < 8; ++i) {
      inputs.emplace_back(kCount, 100 * i + self.rank);
      stream->copy(part.data(), inputs.back().data(), kCount * 8);
      const ConstBuffer in{part.data(), kCount};
      const Buffer out{whole.data(), 3 * kCount};
      self.comm->all_gather({&in, 1}, {&out, 1}, DType::int64, on(*stream, i % 2 == 0)).wait();
      stream->fill(part.data(), 0xee, kCount * 8);
      results.emplace_back(3 * kCount, -1);
      stream->copy(results.back().data(), whole.data(), 3 * kCount * 8);
      stream->fill(whole.data(), 0xee, 3 * kCount * 8);
    }
    stream->synchronize();
    for (int i = 0; i < 8; ++i)
      for (std::size_t k = 0; k < 3 * kCount; k += 299)
        EXPECT_EQ(results[static_cast<std::size_t>(i)][k],
                  static_cast<std::int64_t>(100 * i) + static_cast<std::int64_t>(k / kCount));
  });
}
