// A gradient in two terms: the bits of a step, and of its squares, are those after adding the terms first.
#include <cstring>
#include <string>
#include <vector>

#include "device/kernels.hpp"
#include "optim/kinds.hpp"
#include "shard_state.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"
#include "zcomm/optim_batch.hpp"

namespace zcomm {
namespace {

void step_of(const OptimShard& shard, const AdamParams& p, int threads, ExactSum* sum) {
  adam_step(shard, p, threads, sum);
}
void step_of(const OptimShard& shard, const SgdParams& p, int threads, ExactSum* sum) {
  sgd_step(shard, p, threads, sum);
}
void step_of(const OptimShard& shard, const LionParams& p, int threads, ExactSum* sum) {
  lion_step(shard, p, threads, sum);
}
void step_of(const OptimShard& shard, const AdagradParams& p, int threads, ExactSum* sum) {
  adagrad_step(shard, p, threads, sum);
}

/// The sum of a gradient's terms, as one rank's reduce_scatter leaves it.
struct Terms {
  std::vector<float> grad;
  std::vector<std::byte> addend;
  DType addend_dtype;
  std::vector<float> sum;

  Terms(std::size_t count, DType dtype, unsigned seed)
      : grad(random_floats(count, seed, 0.1f)), addend(gradient(count, dtype, seed + 1)), addend_dtype(dtype) {
    if (count > 3) grad[3] = 1e-40f, std::memset(addend.data() + 3 * size_of(dtype), 0, size_of(dtype));
    sum = grad;
    void* const dst[] = {sum.data()};
    const void* const src[] = {addend.data()};
    device::reduce({dst, src, count, dtype, DType::float32, ReduceOp::avg, true});
  }

  OptimShard of(OptimShard shard) const {
    shard.grad = grad.data();
    shard.grad_dtype = DType::float32;
    shard.addend = addend.data();
    shard.addend_dtype = addend_dtype;
    return shard;
  }
  OptimShard added(OptimShard shard) const {
    shard.grad = sum.data();
    shard.grad_dtype = DType::float32;
    return shard;
  }
};

/// Three steps of `params`, the one with terms in two cuts and on `threads` threads.
template <class Params>
void expect_bits_of_adding(Params params, DType weight, DType state, DType addend, std::size_t count, int threads) {
  const int arrays = optim::Kind<Params>::arrays(params);
  const std::size_t tile = state == DType::uint8 ? 1024 : 30000, cut = count / 3 / 256 * 256;
  State first = make_state(weight, tile, random_floats(count, 1), arrays, state), second = first;
  for (int t = 1; t <= 3; ++t) {
    if constexpr (requires { params.step; }) params.step = t;
    const Terms terms(count, addend, static_cast<unsigned>(10 * t));
    const std::vector<float> before = terms.grad;
    ExactSum expected, found;
    ExactSum* const squares = t == 2 ? nullptr : &found;
    step_of(terms.added(first.shard(nullptr, DType::float32)), params, 1, &expected);
    OptimShard shard = terms.of(second.shard(nullptr, DType::float32));
    shard.end = cut;
    step_of(shard, params, threads, squares);
    shard.begin = cut, shard.end = count;
    step_of(shard, params, threads, squares);
    if (squares != nullptr) EXPECT_EQ(found.value(), expected.value());
    EXPECT_TRUE(terms.grad == before);
    if (!(first == second))
      test::fail(__FILE__, __LINE__,
                 std::string(optim::Kind<Params>::kName) + ", " + std::string(name_of(weight)) + " weight, " +
                     std::string(name_of(state)) + " state, " + std::string(name_of(addend)) + " addend, count " +
                     std::to_string(count) + ", step " + std::to_string(t));
  }
}

TEST(addend, has_the_bits_of_adding_first) {
  for (const DType addend : kGrads)
    for (const std::size_t count : {std::size_t{1}, std::size_t{255}, std::size_t{1025}, std::size_t{40001}}) {
      const int threads = count > 5000 ? 0 : 1;
      for (const DType weight : kWeights) {
        for (const DType state : {DType::float32, DType::bfloat16, DType::uint8})
          expect_bits_of_adding(AdamParams{.weight_decay = 0.1, .grad_scale = 0.5f}, weight, state, addend, count,
                                threads);
        const auto others = [&](auto params) {
          expect_bits_of_adding(params, weight, DType::float32, addend, count, threads);
        };
        others(SgdParams{.lr = 0.1});
        others(SgdParams{.momentum = 0.9, .nesterov = true, .maximize = true, .buffer = true});
        others(LionParams{.lr = 1e-2});
        others(AdagradParams{.lr_decay = 0.1});
      }
    }
}

TEST(addend, has_the_same_sum_on_every_cpu) {
  for (const DType addend : kGrads)
    for (const std::size_t count : {std::size_t{1}, std::size_t{31}, std::size_t{512}, std::size_t{1500}}) {
      const Terms terms(count, addend, 7);
      for (const Isa isa : kIsas) {
        if (isa > best_isa()) continue;
        std::vector<float> sum(count + 1, -1.0f);
        optim::optim_table(isa).add(sum.data(), terms.grad.data(), terms.addend.data(), addend, count);
        EXPECT_TRUE(std::memcmp(sum.data(), terms.sum.data(), count * sizeof(float)) == 0);
        EXPECT_EQ(sum[count], -1.0f);
      }
    }
}

TEST(addend, of_an_f16_weight) {
  const std::size_t count = 9001, tile = 5000;
  const auto start = random_floats(count, 1);
  std::vector<std::uint16_t> weights[2] = {std::vector<std::uint16_t>(count), std::vector<std::uint16_t>(count)};
  std::vector<float> states[2] = {std::vector<float>(3 * count), std::vector<float>(3 * count)};
  OptimShard shards[2];
  for (int k = 0; k < 2; ++k) {
    shards[k] = {weights[k].data(),
                 DType::float16,
                 nullptr,
                 DType::float32,
                 reinterpret_cast<std::byte*>(states[k].data()),
                 count,
                 tile,
                 0,
                 count};
    split_master(shards[k], start.data());
  }
  for (int t = 1; t <= 2; ++t) {
    const Terms terms(count, DType::float16, static_cast<unsigned>(t));
    adam_step(terms.added(shards[0]), {.lr = 0.1, .step = t});
    adam_step(terms.of(shards[1]), {.lr = 0.1, .step = t});
    EXPECT_TRUE(weights[0] == weights[1]);
    EXPECT_TRUE(std::memcmp(states[0].data(), states[1].data(), 3 * count * sizeof(float)) == 0);
  }
}

TEST(addend, of_some_items_of_a_batch) {
  const std::size_t counts[] = {300, 40000, 7};
  std::vector<State> batched, single;
  for (const std::size_t count : counts) batched.push_back(make_state(DType::bfloat16, 30000, random_floats(count, 2)));
  single = batched;
  std::vector<Terms> terms;
  for (const std::size_t count : counts) terms.emplace_back(count, DType::bfloat16, 5u);
  OptimBatch<AdamParams> batch;
  std::vector<const void*> grads;
  ExactSum found, expected;
  for (std::size_t k = 0; k < 3; ++k) {
    OptimShard shard = terms[k].of(batched[k].shard(nullptr, DType::float32));
    if (k == 1) shard = terms[k].added(batched[k].shard(nullptr, DType::float32));
    batch.add({shard, 0});
    grads.push_back(shard.grad);
    adam_step(terms[k].added(single[k].shard(nullptr, DType::float32)), {.lr = 0.1}, 1, &expected);
  }
  const AdamParams params[] = {{.lr = 0.1}};
  batch.step(params, grads, 0, &found);
  for (std::size_t k = 0; k < 3; ++k) EXPECT_TRUE(batched[k] == single[k]);
  EXPECT_EQ(found.value(), expected.value());
}

TEST(addend, is_checked) {
  State s = make_state(DType::float32, 100, random_floats(10, 1));
  const State before = s;
  const Terms terms(10, DType::bfloat16, 3);
  OptimShard shard = terms.of(s.shard(nullptr, DType::float32));
  shard.addend_dtype = DType::int32;
  EXPECT_THROW_WITH(adam_step(shard, {}), InvalidArgument, "adam: addend is int32; it must be float32, bfloat16 or");
  shard = terms.of(s.shard(nullptr, DType::float32));
  shard.grad_dtype = DType::bfloat16;
  EXPECT_THROW_WITH(adam_step(shard, {}), InvalidArgument, "adam: grad is bfloat16; with an addend it must be float32");
  EXPECT_TRUE(s == before);
}

}  // namespace
}  // namespace zcomm
