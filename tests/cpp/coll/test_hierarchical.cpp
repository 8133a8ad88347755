// Two levels: values of every operation, symmetric memory of a host, errors that all ranks of all hosts see.
#include <atomic>
#include <chrono>

#include "coll/support/hierarchical_world.hpp"
#include "coll/support/value_checks.hpp"

using namespace zcomm;
using namespace zcomm::test;
using namespace zcomm::test::links;

namespace {

const std::vector<std::vector<int>> kLayouts = {
    {0}, {0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1, 1}, {0, 1, 2, 1, 2, 0}};

void check_moves_and_reductions(Rank& self, const Sample& c) {
  check_all_reduce(self, c);
  check_reduce(self, c);
  check_reduce_scatter(self, c);
  check_moves(self, c);
  check_all_to_all(self, c);
}

}  // namespace

TEST(hierarchical, values) {
  for (const auto& layout : kLayouts) {
    run_hosts(layout, 30, [](Rank& self) {
      for (const std::size_t count : {0, 1, 77, 5000}) {
        for (const DType dtype : {DType::float32, DType::bfloat16, DType::int64}) {
          for (const ReduceOp op : kOps)
            if (op != ReduceOp::avg || is_floating(dtype)) check_moves_and_reductions(self, {dtype, op, count});
        }
      }
      self.comm->barrier().wait();
    });
  }
}

TEST(hierarchical, every_dtype) {
  run_hosts({0, 0, 1, 1}, 30, [](Rank& self) {
    for (const DType dtype : kDTypes) check_moves_and_reductions(self, {dtype, ReduceOp::max, 333});
    for (const DType dtype : kDTypes) check_moves_and_reductions(self, {dtype, ReduceOp::sum, 333});
  });
}

TEST(hierarchical, symmetric_memory_is_that_of_the_host) {
  run_hosts({0, 0, 1, 1}, 30, [](HierarchicalRank& self) {
    constexpr std::size_t count = 4096;
    const auto buffer = self.comm->allocate(count * sizeof(float));
    const int mate = self.rank ^ 1, stranger = self.rank ^ 2;
    EXPECT_THROW_WITH(buffer->peer(stranger), Unsupported, "another host");
    auto* const values = reinterpret_cast<float*>(buffer->data());
    values[0] = static_cast<float>(self.rank);
    self.comm->barrier().wait();
    EXPECT_EQ(*reinterpret_cast<float*>(buffer->peer(mate)), static_cast<float>(mate));
    self.comm->barrier().wait();
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(self.rank + 1);
    const Buffer whole{values, count};
    self.comm->all_reduce({&whole, 1}, DType::float32, ReduceOp::sum).wait();
    for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(values[i], 10.0f);
    EXPECT_THROW_WITH(self.comm->allocate_shared(10), Unsupported, "several hosts");
    EXPECT_THROW_WITH(self.comm->allocate(std::size_t{1} << 62), SystemError, "refused");
    self.comm->barrier().wait();
  });
}

TEST(hierarchical, all_ranks_end_with_the_same_bits) {
  std::vector<std::vector<float>> results(6);
  run_hosts({0, 0, 1, 1, 2, 2}, 30, [&](HierarchicalRank& self) {
    auto values = random_floats(10'007, static_cast<unsigned>(self.rank));
    const Buffer buffer{values.data(), values.size()};
    self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum).wait();
    results[static_cast<std::size_t>(self.rank)] = values;
  });
  for (const auto& result : results) EXPECT_TRUE(result == results[0]);
}

TEST(hierarchical, messages_between_any_two) {
  run_hosts({0, 0, 1, 1}, 30, [](HierarchicalRank& self) {
    for (int other = 0; other < 4; ++other) {
      if (other == self.rank) continue;
      const float mine = static_cast<float>(self.rank);
      const ConstBuffer out{&mine, 1};
      self.comm->send({&out, 1}, DType::float32, other, 0, kBlocking);
    }
    for (int other = 0; other < 4; ++other) {
      if (other == self.rank) continue;
      float theirs = -1;
      const Buffer in{&theirs, 1};
      self.comm->recv({&in, 1}, DType::float32, other, 0, kBlocking);
      EXPECT_EQ(theirs, static_cast<float>(other));
    }
    self.comm->barrier().wait();
  });
  run_hosts(
      {0, 0, 1, 1}, 30,
      [](HierarchicalRank& self) {
        EXPECT_THROW_WITH(self.comm->send({}, DType::float32, self.rank ^ 1, 0, kBlocking), Unsupported, "no link");
        self.comm->barrier().wait();
      },
      false);
}

TEST(hierarchical, uneven_hosts_are_refused) {
  Cables cables(3, 2);
  EXPECT_THROW_WITH(coll::create_hierarchical(cables.adopt(0), net::Mesh::adopt(0, std::vector<net::AdoptedSockets>(1)),
                                              {0, 1, 1}, std::move(cables.links[0])),
                    InvalidArgument, "host 0 has 1 ranks and host 1 has 2");
}

TEST(hierarchical, all_to_all_counts_are_compared) {
  run_hosts({0, 0, 1, 1}, 30, [](HierarchicalRank& self) {
    std::vector<float> values(100);
    const std::vector<ConstBuffer> in(4, ConstBuffer{values.data(), 4});
    std::vector<Buffer> out;
    for (std::size_t q = 0; q < 4; ++q)
      out.push_back({values.data() + 10 * (q + 1), self.rank == 3 && q == 0 ? 5u : 4u});
    EXPECT_THROW_WITH(self.comm->all_to_all(in, out, DType::float32).wait(), CollectiveMismatch,
                      "rank 0 sends 4 elements to rank 3, which expects 5");
  });
}

TEST(hierarchical, mismatches_are_seen_by_all) {
  for (const int odd : {0, 3}) {
    for (const bool whole_host : {false, true}) {
      for (const bool messages : {false, true}) {
        run_hosts(
            {0, 0, 1, 1}, 30,
            [&](HierarchicalRank& self) {
              float values[200] = {};
              const bool other = whole_host ? self.rank / 2 == odd / 2 : self.rank == odd;
              const Buffer buffer{values, other ? 200u : 100u};
              EXPECT_THROW_WITH(self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, "g").wait(),
                                CollectiveMismatch, "count=200");
              EXPECT_THROW_WITH(self.comm->barrier(), CollectiveMismatch, "unusable since");
            },
            messages);
      }
    }
  }
}

TEST(hierarchical, a_rank_that_dies_is_named_by_all) {
  for (const int dead : {0, 3}) {
    std::atomic<int> survivors{3};
    run_hosts({0, 0, 1, 1}, 30, [&](HierarchicalRank& self) {
      if (self.rank == dead) {
        self.comm->barrier().wait();
        self.die();
        while (survivors > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      std::vector<float> values(10000);
      const Buffer buffer{values.data(), values.size()};
      try {
        self.comm->barrier().wait();
        for (;;) self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum).wait();
      } catch (const PeerLost& lost) {
        EXPECT_EQ(lost.rank, dead);
      }
      EXPECT_THROW(self.comm->barrier(), PeerLost);
      --survivors;
    });
  }
}

TEST(hierarchical, a_late_rank_ends_all_with_a_timeout) {
  std::atomic<int> gave_up{0};
  run_hosts({0, 0, 1, 1}, 0.3, [&](HierarchicalRank& self) {
    self.comm->barrier("first").wait();
    if (self.rank == 3) {
      while (gave_up < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_THROW(self.comm->barrier("late").wait(), Timeout);
      return;
    }
    std::string message;
    try {
      self.comm->barrier("late").wait();
      fail(__FILE__, __LINE__, "the barrier passed without rank 3");
    } catch (const Timeout& error) {
      message = error.what();
    }
    // Either level may be first: between hosts rank 3 is named, on its host it is rank 1 of ranks 2 and 3.
    EXPECT_TRUE(message.find("rank 3") != std::string::npos || message.find("ranks 2 and 3") != std::string::npos);
    ++gave_up;
  });
}
