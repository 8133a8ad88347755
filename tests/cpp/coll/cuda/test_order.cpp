// Backend cuda_ipc and streams: every missing wait is a wrong number, for streams run when they like.
#include <cstring>
#include <deque>

#include "coll/support/device_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

const DeviceOptions kDelayed{.max_delay_s = 300e-6};

Call on(device::Stream& stream, bool async) {
  Call call("", async);
  call.stream = handle_of(stream);
  return call;
}

/// `count` int64 on the device, private or symmetric.
struct Tensor {
  std::shared_ptr<void> owner;
  std::int64_t* data;
  Tensor(DeviceRank& self, std::size_t count, bool symmetric) {
    if (symmetric) {
      auto buffer = self.comm->allocate(count * 8);
      data = reinterpret_cast<std::int64_t*>(buffer->data());
      owner = std::move(buffer);
    } else {
      owner = self.device->allocate(count * 8);
      data = static_cast<std::int64_t*>(owner.get());
    }
  }
};

/// Sets all elements to `value` on the stream: from a host array that lives as long as the test.
class Values {
 public:
  explicit Values(std::size_t count) : count_(count) {}
  void set(device::Stream& stream, std::int64_t* to, std::int64_t value) {
    kept_.emplace_back(count_, value);
    stream.copy(to, kept_.back().data(), count_ * 8);
  }
  std::int64_t* result() {
    kept_.emplace_back(count_, -1);
    return kept_.back().data();
  }

 private:
  std::size_t count_;
  std::deque<std::vector<std::int64_t>> kept_;
};

}  // namespace

TEST(cuda_ipc_order, inputs_come_from_and_results_go_to_the_callers_stream) {
  for (const int world : {1, 2, 3})
    for (const bool symmetric : {false, true})
      for (const bool async : {false, true})
        run_device_world(world, kDelayed, [=](DeviceRank& self) {
          constexpr std::size_t kCount = 1500;  // private: several steps
          auto stream = self.device->make_stream(false);
          Tensor x(self, kCount, symmetric);
          Values values(kCount);
          std::vector<std::int64_t*> results;
          for (int i = 0; i < 12; ++i) {
            values.set(*stream, x.data, i * 10 + self.rank);  // overwrites the last operation's result
            const Buffer buffer{x.data, kCount};
            Work work = self.comm->all_reduce({&buffer, 1}, DType::int64, ReduceOp::sum, on(*stream, async));
            if (i % 3 != 2) work.wait();  // else dropping it orders the stream
            work = Work();
            results.push_back(values.result());
            stream->copy(results.back(), x.data, kCount * 8);
          }
          stream->synchronize();
          for (int i = 0; i < 12; ++i) {
            const std::int64_t wanted = i * 10 * world + world * (world - 1) / 2;
            EXPECT_EQ(results[static_cast<std::size_t>(i)][0], wanted);
            EXPECT_EQ(results[static_cast<std::size_t>(i)][kCount - 1], wanted);
          }
        });
}

TEST(cuda_ipc_order, many_in_flight_on_several_streams) {
  run_device_world(3, kDelayed, [](DeviceRank& self) {
    constexpr std::size_t kCount = 700;
    constexpr int kTurns = 50;  // more than the host may be ahead
    auto a = self.device->make_stream(false), b = self.device->make_stream(false),
         out = self.device->make_stream(false);
    Values values(kCount);
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    std::vector<std::int64_t*> results;
    for (int i = 0; i < kTurns; ++i) {
      tensors.emplace_back(self, kCount, false);
      device::Stream& stream = i % 2 == 0 ? *a : *b;
      values.set(stream, tensors.back().data, i + self.rank);
      const Buffer buffer{tensors.back().data, kCount};
      works.push_back(self.comm->all_reduce({&buffer, 1}, DType::int64, ReduceOp::max, on(stream, true)));
    }
    for (int i = kTurns - 1; i >= 0; --i) {
      const auto k = static_cast<std::size_t>(i);
      works[k].wait_on(handle_of(*out));  // another stream than the call's
      results.push_back(values.result());
      out->copy(results.back(), tensors[k].data, kCount * 8);
    }
    out->synchronize();
    for (const Work& work : works) EXPECT_TRUE(work.done());
    for (int i = 0; i < kTurns; ++i) EXPECT_EQ(results[static_cast<std::size_t>(kTurns - 1 - i)][kCount / 2], i + 2);
  });
}

/// Each rank overwrites its part as soon as its own stream may: a peer that still reads it would see that.
TEST(cuda_ipc_order, inputs_may_be_overwritten_after_the_end) {
  for (const bool symmetric : {false, true})
    run_device_world(4, kDelayed, [=](DeviceRank& self) {
      constexpr std::size_t kCount = 600;
      auto stream = self.device->make_stream(false);
      Tensor part(self, kCount, symmetric), whole(self, kCount * 4, false);
      Values values(kCount), all(kCount * 4);
      std::vector<std::int64_t*> results;
      for (int i = 0; i < 10; ++i) {
        values.set(*stream, part.data, 100 * i + self.rank);
        const ConstBuffer in{part.data, kCount};
        const Buffer out{whole.data, kCount * 4};
        self.comm->all_gather({&in, 1}, {&out, 1}, DType::int64, on(*stream, i % 2 == 0)).wait();
        stream->fill(part.data, 0xee, kCount * 8);
        results.push_back(all.result());
        stream->copy(results.back(), whole.data, kCount * 4 * 8);
        stream->fill(whole.data, 0xee, kCount * 4 * 8);
      }
      stream->synchronize();
      for (int i = 0; i < 10; ++i)
        for (std::size_t k = 0; k < 4 * kCount; k += 599)
          EXPECT_EQ(results[static_cast<std::size_t>(i)][k], static_cast<std::int64_t>(100 * i + k / kCount));
    });
}

TEST(cuda_ipc_order, mixed_operations) {
  run_device_world(3, kDelayed, [](DeviceRank& self) {
    constexpr std::size_t kPart = 400, kCount = 3 * kPart;
    auto stream = self.device->make_stream(false);
    Tensor x(self, kCount, true), y(self, kCount, false), z(self, kPart, false);
    Values values(kCount), parts(kPart);
    std::vector<std::int64_t*> results;
    for (int i = 0; i < 8; ++i) {
      values.set(*stream, x.data, i + 1);
      const ConstBuffer in{x.data, kCount}, z_in{z.data, kPart};
      const Buffer z_out{z.data, kPart}, y_out{y.data, kCount};
      // x -> z: 3 (i + 1), then z -> y, y exchanged, y of rank 1 to every rank; all on the engine's stream.
      std::vector<Work> works;
      works.push_back(self.comm->reduce_scatter({&in, 1}, {&z_out, 1}, DType::int64, ReduceOp::sum, DType::int64, false,
                                                on(*stream, true)));
      works.push_back(self.comm->all_gather({&z_in, 1}, {&y_out, 1}, DType::int64, on(*stream, true)));
      std::vector<ConstBuffer> from;
      std::vector<Buffer> to;
      for (std::size_t q = 0; q < 3; ++q)
        from.push_back({y.data + q * kPart, kPart}), to.push_back({x.data + q * kPart, kPart});
      works.push_back(self.comm->all_to_all(from, to, DType::int64, on(*stream, true)));
      const Buffer both{x.data, kCount};
      works.push_back(self.comm->broadcast({&both, 1}, DType::int64, 1, on(*stream, true)));
      works.push_back(self.comm->reduce({&both, 1}, DType::int64, ReduceOp::max, 2, on(*stream, true)));
      for (Work& work : works) work.wait();
      results.push_back(values.result());
      stream->copy(results.back(), x.data, kCount * 8);
    }
    stream->synchronize();
    for (int i = 0; i < 8; ++i)
      for (const std::size_t k : {std::size_t{0}, kPart, kCount - 1})
        EXPECT_EQ(results[static_cast<std::size_t>(i)][k], 3 * (i + 1));
  });
}

TEST(cuda_ipc_order, a_barrier_is_one_of_streams_too) {
  run_device_world(2, kDelayed, [](DeviceRank& self) {
    auto stream = self.device->make_stream(false);
    auto buffer = self.comm->allocate(8);
    std::int64_t one = 1, seen = 0;
    for (int i = 0; i < 5; ++i) {
      if (self.rank == 0) {
        stream->fill(buffer->data(), 0, 8);
        stream->copy(buffer->data(), &one, 8);
      }
      self.comm->barrier(on(*stream, false));
      if (self.rank == 1) {
        stream->copy(&seen, buffer->peer(0), 8);
        stream->synchronize();
        EXPECT_EQ(seen, 1);
      }
      self.comm->barrier(on(*stream, false));
    }
    stream->synchronize();
  });
}
