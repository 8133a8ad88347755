// An all_reduce over two levels in pieces: the bits of one piece, and failures while both levels are under way.
#include <atomic>
#include <chrono>
#include <latch>

#include "coll/support/hierarchical_world.hpp"
#include "coll/support/value_checks.hpp"

using namespace zcomm;
using namespace zcomm::test;
using namespace zcomm::test::links;

namespace {

struct Reduction {
  DType dtype;
  ReduceOp op;
  ReduceOrder order;
  bool symmetric;
};

/// A list of tensors of which cuts, ends of pieces and remainders fall anywhere; the results, one after the other.
std::vector<std::byte> results_of(HierarchicalRank& self, const Reduction& c) {
  const std::size_t size = size_of(c.dtype);
  std::vector<Memory> tensors;
  std::vector<Buffer> buffers;
  for (const std::size_t count : {0u, 1u, 7001u, 3u, 64u, 20'000u, 129u, 5u, 4096u}) {
    const auto values = random_floats(count, static_cast<unsigned>(self.rank * 100) + static_cast<unsigned>(count));
    std::vector<double> wide(values.begin(), values.end());
    if (!is_floating(c.dtype))
      for (double& value : wide) value = std::floor(value);
    const auto bytes = encode(c.dtype, wide);
    tensors.push_back(Memory::make(*self.comm, count * size, c.symmetric));
    if (count > 0) std::memcpy(tensors.back().data(), bytes.data(), count * size);
    buffers.push_back({tensors.back().data(), count});
  }
  Call call("list");
  call.order = c.order;
  self.comm->all_reduce(buffers, c.dtype, c.op, call).wait();
  std::vector<std::byte> all;
  for (const Buffer& buffer : buffers) {
    const auto* const data = static_cast<const std::byte*>(buffer.data);
    all.insert(all.end(), data, data + buffer.count * size);
  }
  return all;
}

/// Runs all_reduces until one fails; returns its message.
template <class Type>
std::string reduce_until_failure(HierarchicalRank& self, std::size_t count = 40'000) {
  std::vector<float> values(count);
  const Buffer buffer{values.data(), values.size()};
  try {
    for (;;) self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, "g").wait();
  } catch (const Type& error) {
    return error.what();
  } catch (const std::exception& error) {
    fail(__FILE__, __LINE__, "rank " + std::to_string(self.rank) + ": " + error.what());
    return "";
  }
}

}  // namespace

TEST(hierarchical_pieces, have_the_bits_of_one_piece) {
  std::vector<Reduction> reductions;
  for (const bool symmetric : {false, true}) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::int64})
      reductions.push_back({dtype, ReduceOp::sum, ReduceOrder::any, symmetric});
    reductions.push_back({DType::float32, ReduceOp::avg, ReduceOrder::rank, symmetric});
    reductions.push_back({DType::float16, ReduceOp::max, ReduceOrder::any, symmetric});
  }
  for (const auto& layout : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1, 1}, {0, 0, 1, 1, 2, 2}}) {
    const int hosts = layout.back() + 1;
    std::vector<std::vector<std::vector<std::byte>>> all[2];  // [whole, pieces][reduction][rank]
    for (const bool pieces : {false, true}) {
      all[pieces].assign(reductions.size(), std::vector<std::vector<std::byte>>(layout.size()));
      run_hosts(
          layout, 30,
          [&](HierarchicalRank& self) {
            for (std::size_t i = 0; i < reductions.size(); ++i)
              if (hosts == 2 || reductions[i].order == ReduceOrder::rank)
                all[pieces][i][static_cast<std::size_t>(self.rank)] = results_of(self, reductions[i]);
          },
          true, pieces ? 4096 : SIZE_MAX);
    }
    for (std::size_t i = 0; i < reductions.size(); ++i)
      for (const auto& of_rank : all[1][i]) EXPECT_TRUE(of_rank == all[0][i][0]);
  }
}

TEST(hierarchical_pieces, many_operations_in_flight_and_a_reduce) {
  run_hosts({0, 0, 0, 1, 1, 1}, 30, [](HierarchicalRank& self) {
    std::vector<std::vector<float>> tensors;
    std::vector<Work> works;
    for (std::size_t i = 0; i < 30; ++i) tensors.emplace_back(1000 + 1777 * i, static_cast<float>(self.rank + 1));
    for (auto& tensor : tensors) {
      const Buffer buffer{tensor.data(), tensor.size()};
      works.push_back(self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum));
    }
    for (Work& work : works) work.wait();
    for (const auto& tensor : tensors) EXPECT_TRUE(tensor == std::vector<float>(tensor.size(), 21.0f));
    const Buffer last{tensors[29].data(), tensors[29].size()};
    self.comm->reduce({&last, 1}, DType::float32, ReduceOp::sum, 4).wait();
    EXPECT_EQ(tensors[29][50'000], self.rank == 4 ? 126.0f : 21.0f);
  });
}

TEST(hierarchical_pieces, hosts_that_differ_get_the_mismatch_on_all_ranks) {
  for (const bool messages : {false, true}) {
    run_hosts(
        {0, 0, 1, 1}, 30,
        [&](HierarchicalRank& self) {
          std::vector<float> values(40'000);
          const Buffer buffer{values.data(), self.rank < 2 ? 40'000u : 39'000u};
          EXPECT_THROW_WITH(self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, "g").wait(),
                            CollectiveMismatch, "count=39000");
          EXPECT_THROW_WITH(self.comm->barrier(), CollectiveMismatch, "unusable since");
        },
        messages);
  }
}

TEST(hierarchical_pieces, a_rank_that_dies_at_any_moment) {
  for (int round = 0; round < (kSanitized ? 4 : 12); ++round) {
    const int dead = round % 4;
    std::latch survived(3);
    run_hosts({0, 0, 1, 1}, 30, [&](HierarchicalRank& self) {
      if (self.rank != dead) {
        const std::string message = reduce_until_failure<PeerLost>(self);
        EXPECT_TRUE(message.find("rank " + std::to_string(dead) + " died") != std::string::npos);
        return survived.count_down();
      }
      std::thread killer([&self, round] {
        std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
        self.die();
      });
      reduce_until_failure<Error>(self);
      killer.join();
      survived.wait();
    });
  }
}

TEST(hierarchical_pieces, a_rank_that_closes_at_any_moment) {
  for (int round = 0; round < (kSanitized ? 4 : 12); ++round) {
    const int leaver = round % 4;
    run_hosts({0, 0, 1, 1}, 30, [&](HierarchicalRank& self) {
      if (self.rank != leaver) {
        const std::string message = reduce_until_failure<PeerLost>(self);
        EXPECT_TRUE(message.find("rank " + std::to_string(leaver) + " left") != std::string::npos);
        return;
      }
      std::thread closer([&self, round] {
        std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
        self.comm->close();
      });
      reduce_until_failure<Error>(self);
      closer.join();
    });
  }
}

TEST(hierarchical_pieces, a_late_rank_ends_all_at_the_deadline) {
  for (const int late : {1, 2}) {
    std::latch ended(3);
    run_hosts({0, 0, 1, 1}, 0.4, [&](HierarchicalRank& self) {
      std::vector<float> values(40'000);
      const Buffer buffer{values.data(), values.size()};
      self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, "g").wait();
      if (self.rank == late) {
        ended.wait();
        EXPECT_THROW(self.comm->barrier("late").wait(), Error);
        return;
      }
      reduce_until_failure<Timeout>(self);
      ended.count_down();
    });
  }
}
