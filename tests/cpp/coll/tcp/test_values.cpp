// Results of collectives over links: every op, dtype, algorithm and world against sums of small integers, which are
// exact, and against float64 references; equal bits on all ranks.
#include "coll/support/tcp_world.hpp"
#include "coll/support/value_checks.hpp"

using namespace zcomm;
using namespace zcomm::test;
using namespace zcomm::test::links;

TEST(tcp_values, chosen_by_size) {
  for (int world = 1; world <= 5; ++world)
    run_link_world(world, {}, [](Rank& self) { check_all(self, {0, 1, 77, 5000}); });
}

TEST(tcp_values, ring) {
  const Algorithm ring("ring");
  for (int world = 1; world <= 5; ++world)
    run_link_world(world, {}, [](Rank& self) { check_all(self, {0, 1, 77, 5000}); });
}

TEST(tcp_values, halving_and_direct) {
  const Algorithm halving("halving");
  for (int world = 1; world <= 5; ++world)
    run_link_world(world, {}, [](Rank& self) { check_all(self, {0, 1, 77, 5000}); });
}

TEST(tcp_values, larger_worlds) {
  for (const char* name : {"ring", "halving", ""}) {
    const Algorithm algorithm(name);
    for (int world = 6; world <= 9; ++world) {
      run_link_world(world, {}, [](Rank& self) {
        for (const DType dtype : {DType::float32, DType::bfloat16}) {
          const Sample c{dtype, ReduceOp::avg, 3001};
          check_all_reduce(self, c);
          check_reduce(self, c);
          check_reduce_scatter(self, c);
          check_moves(self, c);
          check_all_to_all(self, c);
        }
      });
    }
  }
}

TEST(tcp_values, tcp_with_large_segments) {
  TcpWorld with;
  with.wire = Wire::tcp;
  with.options.segment_nbytes = 64 << 10;
  for (const std::size_t sockets : {2, 5}) {
    with.sockets = sockets;
    run_link_world(3, with, [](Rank& self) {
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::int64}) {
        const Sample c{dtype, ReduceOp::sum, kSanitized ? 120'003u : 300'003u};
        check_all_reduce(self, c);
        check_reduce_scatter(self, {dtype, ReduceOp::sum, kSanitized ? 50'001u : 100'001u});
        check_moves(self, c);
      }
    });
  }
}

TEST(tcp_values, long_lists_are_one_operation) {
  for (const char* name : {"ring", "halving", ""}) {
    const Algorithm algorithm(name);
    run_link_world(4, {}, [](Rank& self) {
      std::vector<std::vector<float>> tensors;
      std::vector<Buffer> buffers;
      for (std::size_t i = 0; i < 100; ++i) tensors.emplace_back(i * 37 % 211, static_cast<float>(self.rank + 1));
      for (auto& tensor : tensors) buffers.push_back({tensor.data(), tensor.size()});
      self.comm->all_reduce(buffers, DType::float32, ReduceOp::sum).wait();
      for (const auto& tensor : tensors)
        for (const float value : tensor) EXPECT_EQ(value, 10.0f);
    });
  }
}

TEST(tcp_values, all_ranks_end_with_the_same_bits) {
  for (const char* name : {"ring", "halving", ""}) {
    const Algorithm algorithm(name);
    for (const std::size_t count : {std::size_t{100}, std::size_t{20'000}}) {
      for (int world = 2; world <= 7; ++world) {
        std::vector<std::vector<float>> results(static_cast<std::size_t>(world));
        run_link_world(world, {}, [&](Rank& self) {
          auto values = random_floats(count, static_cast<unsigned>(self.rank));
          const Buffer buffer{values.data(), count};
          self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum).wait();
          results[static_cast<std::size_t>(self.rank)] = values;
        });
        std::vector<double> sums(count), sizes(count);
        for (int r = 0; r < world; ++r) {
          const auto values = random_floats(count, static_cast<unsigned>(r));
          for (std::size_t i = 0; i < count; ++i) sums[i] += values[i], sizes[i] += std::abs(values[i]);
        }
        for (const auto& result : results) EXPECT_TRUE(result == results[0]);
        for (std::size_t i = 0; i < count; ++i)
          EXPECT_NEAR(static_cast<double>(results[0][i]), sums[i], sizes[i] * world * 6e-8);
      }
    }
  }
}

TEST(tcp_values, two_byte_floats_are_rounded_once) {
  // 1 + 7 * 2^-9 in bf16: each partial sum would round back to 1; the exact sum rounds to 1 + 2^-6.
  for (const char* name : {"ring", "halving", ""}) {
    const Algorithm algorithm(name);
    run_link_world(8, {}, [](Rank& self) {
      constexpr std::size_t count = 2000;
      const double own = self.rank == 0 ? 1.0 : std::ldexp(1.0, -9), sum = 1.0 + 7 * std::ldexp(1.0, -9);
      auto data = encode(DType::bfloat16, std::vector<double>(count, own));
      const Buffer buffer{data.data(), count};
      self.comm->all_reduce({&buffer, 1}, DType::bfloat16, ReduceOp::sum).wait();
      EXPECT_TRUE(equal(DType::bfloat16, data.data(), std::vector<double>(count, sum)));

      const auto in = encode(DType::bfloat16, std::vector<double>(8 * count, own));
      std::vector<float> exact(count, 3.0f);
      const ConstBuffer from{in.data(), 8 * count};
      const Buffer to{exact.data(), count};
      self.comm->reduce_scatter({&from, 1}, {&to, 1}, DType::bfloat16, ReduceOp::sum, DType::float32, true).wait();
      for (const float value : exact) EXPECT_EQ(value, static_cast<float>(sum + 3));
      auto rounded = encode(DType::bfloat16, std::vector<double>(count, 2));
      const Buffer narrow{rounded.data(), count};
      self.comm->reduce_scatter({&from, 1}, {&narrow, 1}, DType::bfloat16, ReduceOp::sum, DType::bfloat16, true).wait();
      EXPECT_TRUE(equal(DType::bfloat16, rounded.data(), std::vector<double>(count, 3.015625)));
    });
  }
}

TEST(tcp_values, barrier_orders) {
  std::atomic<int> before{0};
  run_link_world(5, {}, [&](Rank& self) {
    for (int round = 1; round <= 20; ++round) {
      ++before;
      self.comm->barrier().wait();
      EXPECT_GE(before.load(), 5 * round);
      self.comm->barrier().wait();
    }
  });
}

TEST(tcp_values, many_asynchronous_operations) {
  run_link_world(3, {}, [](Rank& self) {
    std::vector<std::vector<float>> tensors;
    std::vector<Work> works;
    for (std::size_t i = 0; i < 60; ++i) tensors.emplace_back(i * 331 % 9000, static_cast<float>(self.rank));
    for (auto& tensor : tensors) {
      const Buffer buffer{tensor.data(), tensor.size()};
      works.push_back(self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum));
    }
    for (Work& work : works) work.wait();
    for (const auto& tensor : tensors)
      for (const float value : tensor) EXPECT_EQ(value, 3.0f);
  });
}

TEST(tcp_values, memory_is_private) {
  run_link_world(2, {}, [](Rank& self) {
    const auto buffer = self.comm->allocate(100);
    EXPECT_EQ(self.comm->memory().symmetric_nbytes, std::size_t{100});
    EXPECT_EQ(self.comm->memory().allocation_count, std::size_t{2});  // and the slots
    self.comm->allocate(50).reset();
    EXPECT_EQ(self.comm->memory().symmetric_nbytes, std::size_t{100});
    for (std::size_t i = 0; i < 100; ++i) EXPECT_EQ(static_cast<int>(buffer->data()[i]), 0);
    EXPECT_TRUE(buffer->peer(self.rank) == buffer->data());
    EXPECT_THROW_WITH(buffer->peer(1 - self.rank), Unsupported, "peer(");
    EXPECT_THROW_WITH(self.comm->allocate_shared(100), Unsupported, "share no memory");
    EXPECT_THROW_WITH(self.comm->duplicate(), Unsupported, "split");
    self.comm->barrier().wait();  // nothing was poisoned
  });
  run_link_world(1, {}, [](Rank& self) { EXPECT_EQ(self.comm->allocate_shared(5)->nbytes(), std::size_t{5}); });
}
