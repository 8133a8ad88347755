// ReduceOrder::rank: the bits of a plain fp32 loop in rank order, whatever the size, the list and the algorithm.
#include "coll/support/error_checks.hpp"
#include "coll/support/hierarchical_world.hpp"
#include "coll/support/value_checks.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

Call in_rank_order(const char* name = "") {
  Call call(name);
  call.order = ReduceOrder::rank;
  return call;
}

/// ((v0 + v1) + v2) + ... of the given vectors.
std::vector<float> in_order(const std::vector<std::vector<float>>& all) {
  std::vector<float> sums = all[0];
  for (std::size_t r = 1; r < all.size(); ++r)
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += all[r][i];
  return sums;
}

std::vector<float> input_of(int rank, std::size_t count) {
  return random_floats(count, static_cast<unsigned>(rank + 1));
}

std::vector<std::vector<float>> inputs_of_all(int first, int last, std::size_t count) {
  std::vector<std::vector<float>> all;
  for (int r = first; r < last; ++r) all.push_back(input_of(r, count));
  return all;
}

/// Within each host, then over the hosts.
std::vector<float> tree(int hosts, int local_world_size, std::size_t count) {
  std::vector<std::vector<float>> sums;
  for (int h = 0; h < hosts; ++h)
    sums.push_back(in_order(inputs_of_all(h * local_world_size, (h + 1) * local_world_size, count)));
  return in_order(sums);
}

void check_all_reduce_bits(Rank& self, const std::vector<float>& expected) {
  auto values = input_of(self.rank, expected.size());
  const Buffer whole{values.data(), values.size()};
  self.comm->all_reduce({&whole, 1}, DType::float32, ReduceOp::sum, in_rank_order()).wait();
  EXPECT_TRUE(values == expected);
}

/// expected: of all chunks.
void check_reduce_scatter_bits(Rank& self, const std::vector<float>& expected, bool accumulate) {
  const std::size_t count = expected.size() / static_cast<std::size_t>(self.world);
  const auto values = input_of(self.rank, expected.size());
  std::vector<float> part(count, 3.0f);
  const ConstBuffer in{values.data(), values.size()};
  const Buffer out{part.data(), count};
  self.comm
      ->reduce_scatter({&in, 1}, {&out, 1}, DType::float32, ReduceOp::sum, DType::float32, accumulate, in_rank_order())
      .wait();
  const float* const own = expected.data() + static_cast<std::size_t>(self.rank) * count;
  bool same = true;
  for (std::size_t i = 0; i < count; ++i) same &= part[i] == (accumulate ? 3.0f + own[i] : own[i]);
  EXPECT_TRUE(same);
}

/// Some MiB at the end: several pieces of TcpDirect.
std::vector<std::size_t> sizes(int world) {
  std::vector<std::size_t> all{1, 7, 77, 1000, 4099, 70'001};
  all.push_back((kSanitized ? 300'003u : 1'100'003u) / static_cast<unsigned>(world));
  return all;
}

}  // namespace

TEST(rank_order, bits_of_a_plain_loop_over_tcp) {
  for (int world = 2; world <= 4; ++world) {
    for (const std::size_t count : sizes(world)) {
      const std::vector<float> whole = in_order(inputs_of_all(0, world, count)),
                               dealt = in_order(inputs_of_all(0, world, count * static_cast<std::size_t>(world)));
      run_link_world(world, {}, [&](Rank& self) {
        check_all_reduce_bits(self, whole);
        check_reduce_scatter_bits(self, dealt, false);
        check_reduce_scatter_bits(self, dealt, true);
      });
    }
  }
}

TEST(rank_order, it_holds_whatever_algorithm_is_forced) {
  const links::Algorithm ring("ring");
  const std::vector<float> whole = in_order(inputs_of_all(0, 3, 100'003));
  run_link_world(3, {}, [&](Rank& self) { check_all_reduce_bits(self, whole); });
}

TEST(rank_order, on_one_host) {
  for (const std::size_t count : {std::size_t{77}, std::size_t{70'001}}) {
    const std::vector<float> whole = in_order(inputs_of_all(0, 4, count)),
                             dealt = in_order(inputs_of_all(0, 4, 4 * count));
    run_world(4, small_slots(), [&](Rank& self) {
      check_all_reduce_bits(self, whole);
      check_reduce_scatter_bits(self, dealt, false);
    });
  }
}

TEST(rank_order, on_several_hosts_it_is_a_tree) {
  for (const auto& [layout, hosts, local] :
       {std::tuple{std::vector<int>{0, 0, 1, 1}, 2, 2}, std::tuple{std::vector<int>{0, 0, 0, 1, 1, 1}, 2, 3},
        std::tuple{std::vector<int>{0, 0, 1, 1, 2, 2}, 3, 2}}) {
    const int world = hosts * local;
    for (const std::size_t count : sizes(world)) {
      const std::vector<float> whole = tree(hosts, local, count),
                               dealt = tree(hosts, local, count * static_cast<std::size_t>(world));
      run_hosts(layout, 30, [&](HierarchicalRank& self) {
        check_all_reduce_bits(self, whole);
        check_reduce_scatter_bits(self, dealt, false);
      });
    }
  }
}

TEST(rank_order, a_list_has_the_bits_of_its_tensors) {
  constexpr std::size_t counts[] = {1, 300'000, 63, 17, 50'001};
  run_link_world(3, {}, [&](Rank& self) {
    std::vector<std::vector<float>> tensors;
    std::vector<Buffer> buffers;
    for (const std::size_t count : counts) tensors.push_back(input_of(self.rank, count));
    for (auto& tensor : tensors) buffers.push_back({tensor.data(), tensor.size()});
    self.comm->all_reduce(buffers, DType::float32, ReduceOp::sum, in_rank_order()).wait();
    for (std::size_t i = 0; i < tensors.size(); ++i)
      EXPECT_TRUE(tensors[i] == in_order(inputs_of_all(0, self.world, counts[i])));
  });
}

TEST(rank_order, two_byte_floats_are_summed_in_fp32_and_rounded_once) {
  constexpr std::size_t count = 200'003;
  run_link_world(4, {}, [&](Rank& self) {
    std::vector<std::vector<float>> rounded;
    std::vector<std::byte> own;
    for (int r = 0; r < self.world; ++r) {
      const auto values = input_of(r, count);
      std::vector<std::byte> narrow(2 * count);
      device::cast(narrow.data(), DType::bfloat16, values.data(), DType::float32, count);
      rounded.emplace_back(count);
      device::cast(rounded.back().data(), DType::float32, narrow.data(), DType::bfloat16, count);
      if (r == self.rank) own = std::move(narrow);
    }
    const auto sums = in_order(rounded);
    std::vector<std::byte> expected(2 * count);
    device::cast(expected.data(), DType::bfloat16, sums.data(), DType::float32, count);
    const Buffer whole{own.data(), count};
    self.comm->all_reduce({&whole, 1}, DType::bfloat16, ReduceOp::sum, in_rank_order()).wait();
    EXPECT_TRUE(own == expected);
  });
}

TEST(rank_order, ranks_that_disagree_get_an_error_that_shows_it) {
  const calls::CommCall ordered = [](Communicator& comm) {
    const Buffer buffer{calls::data, 64};
    comm.all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, in_rank_order("g")).wait();
  };
  const auto run = [](const std::function<void(Rank&)>& body) { run_link_world(3, {}, body); };
  expect_mismatch(run, 1, ordered, calls::all_reduce(64), {"float32 sum in rank order count=64", "rank 1"});
  const auto on_host = [](const std::function<void(Rank&)>& body) { run_world(3, small_slots(), body); };
  expect_mismatch(on_host, 2, ordered, calls::all_reduce(64), {"float32 sum in rank order count=64", "rank 2"});
}
