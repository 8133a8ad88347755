// Backend nccl on FakeNccl: its NCCL calls compute the caller's request, for every kind, dtype and reduction.
#include <atomic>
#include <cstring>

#include "coll/support/nccl_world.hpp"
#include "coll/support/value_checks.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

using Ints = std::vector<std::int64_t>;

/// `count` numbers that no other rank or place has.
Ints numbers(int rank, std::size_t count) {
  Ints values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = 1000 * rank + static_cast<std::int64_t>(i);
  return values;
}

Ints of_all_ranks(int world, std::size_t count) {
  Ints all;
  for (int rank = 0; rank < world; ++rank) {
    const Ints next = numbers(rank, count);
    all.insert(all.end(), next.begin(), next.end());
  }
  return all;
}

}  // namespace

TEST(nccl_values, every_operation_dtype_and_reduction) {
  for (const int world : {1, 2, 3}) {
    FakeNccl fake;
    run_nccl_world(world, {}, [](NcclRank& self) {
      links::check_all(
          self, few_values() ? std::initializer_list<std::size_t>{0, 7} : std::initializer_list<std::size_t>{0, 1, 77});
    });
  }
}

TEST(nccl_values, calls_that_stay_in_progress) {
  FakeNccl fake;
  fake.be_slow(3);
  run_nccl_world(2, {}, [](NcclRank& self) {
    for (const DType dtype : {DType::float32, DType::int64}) {
      links::check_all_reduce(self, {dtype, ReduceOp::sum, 33});
      links::check_reduce_scatter(self, {dtype, ReduceOp::sum, 33});
      links::check_moves(self, {dtype, ReduceOp::sum, 33});
      links::check_all_to_all(self, {dtype, ReduceOp::sum, 33});
    }
  });
}

TEST(nccl_values, in_place) {
  FakeNccl fake;
  run_nccl_world(3, {}, [](NcclRank& self) {
    constexpr std::size_t kCount = 50;
    const auto rank = static_cast<std::size_t>(self.rank);
    const Ints all = of_all_ranks(3, kCount), mine = numbers(self.rank, kCount);

    Ints whole = all;
    for (auto& value : whole) value += self.rank;
    const ConstBuffer in{whole.data(), 3 * kCount};
    const Buffer own{whole.data() + rank * kCount, kCount}, out{whole.data(), 3 * kCount};
    self.comm->reduce_scatter({&in, 1}, {&own, 1}, DType::int64, ReduceOp::sum, DType::int64, false).wait();
    for (std::size_t i = 0; i < kCount; ++i) EXPECT_EQ(whole[rank * kCount + i], 3 * mine[i] + 3);

    std::copy(mine.begin(), mine.end(), whole.begin() + static_cast<std::ptrdiff_t>(rank * kCount));
    const ConstBuffer part{own.data, kCount};
    self.comm->all_gather({&part, 1}, {&out, 1}, DType::int64).wait();
    EXPECT_TRUE(whole == all);

    for (int root = 0; root < 3; ++root) {
      const bool is_root = self.rank == root;
      Ints gathered(3 * kCount, -1);
      std::copy(mine.begin(), mine.end(), gathered.begin() + static_cast<std::ptrdiff_t>(rank * kCount));
      const ConstBuffer from{gathered.data() + rank * kCount, kCount};
      const Buffer to{gathered.data(), 3 * kCount};
      self.comm->gather({&from, 1}, {&to, is_root ? 1u : 0u}, DType::int64, root).wait();
      if (is_root) EXPECT_TRUE(gathered == all);

      if (!is_root) std::fill(gathered.begin(), gathered.end(), -1);
      const ConstBuffer source{gathered.data(), 3 * kCount};
      const Buffer target{gathered.data() + rank * kCount, kCount};
      self.comm->scatter({&source, is_root ? 1u : 0u}, {&target, 1}, DType::int64, root).wait();
      EXPECT_TRUE(std::equal(mine.begin(), mine.end(), gathered.begin() + static_cast<std::ptrdiff_t>(rank * kCount)));
    }
  });
}

TEST(nccl_values, a_list_is_one_group) {
  FakeNccl fake;
  run_nccl_world(2, {}, [&](NcclRank& self) {
    constexpr std::size_t kBuffers = 40;  // more than an operation stores without a vector
    std::vector<Ints> tensors, wholes;
    std::vector<Buffer> buffers, outs;
    std::vector<ConstBuffer> ins;
    for (std::size_t i = 0; i < kBuffers; ++i) {
      tensors.push_back(Ints(i % 5, static_cast<std::int64_t>(i)));  // some are empty
      wholes.push_back(Ints(2 * (i % 5), -1));
    }
    for (std::size_t i = 0; i < kBuffers; ++i) {
      buffers.push_back({tensors[i].data(), tensors[i].size()});
      ins.push_back({tensors[i].data(), tensors[i].size()});
      outs.push_back({wholes[i].data(), wholes[i].size()});
    }
    self.comm->all_reduce(buffers, DType::int64, ReduceOp::sum).wait();
    self.comm->all_gather(ins, outs, DType::int64).wait();
    self.comm->gather(ins, self.rank == 1 ? outs : std::vector<Buffer>{}, DType::int64, 1).wait();
    for (std::size_t i = 0; i < kBuffers; ++i) {
      EXPECT_TRUE(tensors[i] == Ints(i % 5, 2 * static_cast<std::int64_t>(i)));
      EXPECT_TRUE(wholes[i] == Ints(2 * (i % 5), 2 * static_cast<std::int64_t>(i)));
    }
    EXPECT_EQ(fake.call_counts(self.rank).groups, 3);
  });
}

TEST(nccl_values, nothing_to_move_needs_no_kernel) {
  FakeNccl fake;
  run_nccl_world(2, {}, [&](NcclRank& self) {
    const Buffer nothing{nullptr, 0};
    const ConstBuffer none{nullptr, 0};
    self.comm->all_reduce({&nothing, 1}, DType::float32, ReduceOp::sum).wait();
    self.comm->all_reduce({}, DType::float32, ReduceOp::sum).wait();
    self.comm->gather({&none, 1}, {&nothing, self.rank == 0 ? 1u : 0u}, DType::float32, 0).wait();
    self.comm->all_to_all(std::vector<ConstBuffer>(2, none), std::vector<Buffer>(2, nothing), DType::float32).wait();
    EXPECT_EQ(fake.call_counts(self.rank).groups, 0);
  });
}

TEST(nccl_values, a_barrier_waits_for_all) {
  FakeNccl fake;
  std::atomic<int> entered{0};
  run_nccl_world(3, {}, [&](NcclRank& self) {
    for (int turn = 1; turn <= 20; ++turn) {
      ++entered;
      self.comm->barrier(turn % 2 == 0 ? Call() : kBlocking).wait();
      EXPECT_LE(3 * turn, entered.load());
      self.comm->barrier(kBlocking);
    }
    EXPECT_EQ(fake.call_counts(self.rank).groups, 40);
  });
}

TEST(nccl_values, ranks_may_call_from_different_places) {
  FakeNccl fake;
  run_nccl_world(2, {}, [](NcclRank& self) {
    const Call call("loss", true, self.rank == 0 ? "train.py:1" : "train.py:2");
    Ints value{self.rank + 1}, exchanged(2), sent(2, 7);
    const Buffer all{value.data(), 1};
    self.comm->all_reduce({&all, 1}, DType::int64, ReduceOp::sum, call).wait();
    EXPECT_EQ(value[0], 3);
    const ConstBuffer in[] = {{sent.data(), 1}, {sent.data() + 1, 1}};
    const Buffer out[] = {{exchanged.data(), 1}, {exchanged.data() + 1, 1}};
    self.comm->all_to_all(in, out, DType::int64, call).wait();
    EXPECT_TRUE(exchanged == sent);
  });
}
