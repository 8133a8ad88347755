// OptimBatch: the bits of a step per shard, however many shards, types, groups and threads; all or nothing.
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "optim/kinds.hpp"
#include "shard_state.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"
#include "zcomm/optim_batch.hpp"

namespace zcomm {
namespace {

const std::size_t kCounts[] = {0, 1, 255, 16384, 7, 256, 0, 40000, 257, 3, 16383, 512, 16385, 70001, 0};

void step_of(const OptimShard& shard, const AdamParams& p, ExactSum* sum) { adam_step(shard, p, 1, sum); }
void step_of(const OptimShard& shard, const SgdParams& p, ExactSum* sum) { sgd_step(shard, p, 1, sum); }
void step_of(const OptimShard& shard, const LionParams& p, ExactSum* sum) { lion_step(shard, p, 1, sum); }
void step_of(const OptimShard& shard, const AdagradParams& p, ExactSum* sum) { adagrad_step(shard, p, 1, sum); }

/// Parameters of many lengths and types, stepped by a batch and one by one.
template <class Params>
struct Both {
  std::deque<State> batched, single;
  std::vector<std::vector<std::byte>> grads;
  std::vector<DType> grad_dtypes;
  std::vector<float> counters;
  OptimBatch<Params> batch;

  explicit Both(std::vector<DType> states, bool buffer = true) {
    std::size_t i = 0;
    for (const std::size_t count : kCounts) {
      const DType state = states[i % states.size()];
      const std::size_t tile = state == DType::uint8 ? 1024 : count % 2 == 0 ? 30000 : 1000000;
      Params params{};
      if constexpr (requires { params.buffer; }) params.buffer = buffer;
      batched.push_back(make_state(kWeights[i / 2 % 2], tile, random_floats(count, static_cast<unsigned>(i)),
                                   optim::Kind<Params>::arrays(params), state));
      grad_dtypes.push_back(kGrads[i++ % 3]);
    }
    single = batched;
    counters.assign(batched.size(), 0.0f);
    for (std::size_t k = 0; k < counters.size(); ++k) counters[k] = k % 4 == 1 ? 6.0f : 0.0f;
    new_gradients(1);
    const bool counts = requires(Params p) { p.step; };
    for (std::size_t k = 0; k < batched.size(); ++k) {
      OptimShard shard = batched[k].shard(nullptr, grad_dtypes[k]);
      shard.first_index = index_of(k);
      batch.add({shard, k % 2, counts ? &counters[k] : nullptr, buffer, k % 3 == 0});
    }
  }

  void new_gradients(unsigned seed) {
    grads.clear();
    for (std::size_t k = 0; k < batched.size(); ++k)
      grads.push_back(gradient(batched[k].count, grad_dtypes[k], seed + static_cast<unsigned>(k)));
  }
  static std::uint64_t index_of(std::size_t k) { return k * (std::uint64_t{1} << 31); }

  void step_batch(const std::vector<Params>& groups, int threads, ExactSum* sum = nullptr) {
    std::vector<const void*> pointers;
    for (const auto& grad : grads) pointers.push_back(grad.data());
    batch.step(groups, pointers, threads, sum);
  }

  void step_single(const std::vector<Params>& groups, int number, ExactSum* sum, bool buffer = true) {
    for (std::size_t k = 0; k < single.size(); ++k) {
      Params params = groups[k % 2];
      if constexpr (requires { params.step; }) params.step = number + (k % 4 == 1 ? 6 : 0);
      if constexpr (requires { params.first; }) params.buffer = buffer, params.first = k % 3 == 0;
      OptimShard shard = single[k].shard(grads[k].data(), grad_dtypes[k]);
      shard.first_index = index_of(k);
      step_of(shard, params, sum);
    }
  }
};

template <class Params>
void expect_equal_steps(const std::vector<Params>& groups, const std::vector<DType>& states, bool buffer = true) {
  for (const int threads : {1, 2, 0}) {
    Both<Params> both(states, buffer);
    for (int number = 1; number <= 3; ++number) {
      both.new_gradients(static_cast<unsigned>(100 * number));  // elsewhere
      ExactSum batched, single;
      both.step_batch(groups, threads, &batched);
      both.step_single(groups, number, &single, buffer);
      EXPECT_EQ(batched.value(), single.value());
    }
    both.step_batch(groups, threads);
    both.step_single(groups, 4, nullptr, buffer);
    for (std::size_t k = 0; k < both.single.size(); ++k) EXPECT_TRUE(both.batched[k] == both.single[k]);
  }
}

TEST(batch, adam_has_the_bits_of_single_steps) {
  const std::vector<AdamParams> groups = {{.lr = 1e-2, .weight_decay = 0.1, .grad_scale = 0.5f},
                                          {.lr = 1e-3, .beta1 = 0.8, .adamw = false, .maximize = true}};
  expect_equal_steps(groups, {DType::float32});
  expect_equal_steps(groups, {DType::uint8, DType::float32, DType::bfloat16, DType::uint8});
}

TEST(batch, others_have_the_bits_of_single_steps) {
  expect_equal_steps<SgdParams>({{.momentum = 0.9, .dampening = 0.1}, {.momentum = 0.5, .nesterov = true}},
                                {DType::float32});
  expect_equal_steps<SgdParams>({{.lr = 0.1}, {.weight_decay = 0.1}}, {DType::float32}, false);
  expect_equal_steps<LionParams>({{}, {.lr = 1e-2, .maximize = true}}, {DType::float32});
  expect_equal_steps<AdagradParams>({{.lr_decay = 0.1}, {.lr = 1e-2}}, {DType::float32});
}

TEST(batch, f16_weights_are_written_from_their_masters) {
  const std::size_t count = 30000;
  const auto start = random_floats(count, 3), grad = random_floats(count, 4);
  State full = make_state(DType::float32, count, start);
  std::vector<std::uint16_t> half(count), expected(count);
  std::vector<float> storage(3 * count);
  OptimShard shard{half.data(), DType::float16, nullptr, DType::float32, reinterpret_cast<std::byte*>(storage.data()),
                   count,       count,          0,       count};
  split_master(shard, start.data());
  OptimBatch<AdamParams> batch;
  float counters[2] = {};
  batch.add({full.shard(nullptr, DType::float32), 0, &counters[0]});
  batch.add({shard, 0, &counters[1]});
  const void* grads[] = {grad.data(), grad.data()};
  const AdamParams params[] = {{.lr = 0.1}};
  for (int t = 0; t < 3; ++t) batch.step(params, grads);
  EXPECT_TRUE(std::memcmp(storage.data(), full.weight.data(), count * sizeof(float)) == 0);
  device::cast(expected.data(), DType::float16, full.weight.data(), DType::float32, count);
  EXPECT_TRUE(half == expected);
  EXPECT_EQ(counters[1], 3.0f);
}

TEST(batch, refuses_all_or_nothing) {
  Both<AdamParams> both({DType::float32});
  const std::deque<State> before = both.batched;
  const auto counters = both.counters;
  EXPECT_THROW_WITH(both.step_batch({{}}, 0), InvalidArgument, "adam: an item is of group 1, given are 1");
  EXPECT_THROW_WITH(both.step_batch({{}, {.beta1 = 1.5}}, 0), InvalidArgument, "adam: beta 1.5");
  EXPECT_THROW_WITH(both.batch.step(std::vector<AdamParams>(2), {}), InvalidArgument, "adam: 0 gradients for 15");
  std::vector<const void*> grads(both.grads.size());
  for (std::size_t k = 0; k < grads.size(); ++k) grads[k] = k == 13 ? nullptr : both.grads[k].data();
  EXPECT_THROW_WITH(both.batch.step(std::vector<AdamParams>(2), grads), InvalidArgument, "grad is null, count 70001");
  EXPECT_TRUE(before == both.batched);
  EXPECT_TRUE(counters == both.counters);
}

TEST(batch, of_nothing_is_a_step) {
  OptimBatch<LionParams> batch;
  batch.step({}, {});
  EXPECT_EQ(batch.size(), 0u);
}

}  // namespace
}  // namespace zcomm
