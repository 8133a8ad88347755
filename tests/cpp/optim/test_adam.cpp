// Adam: against an f64 reference; equal bits on every ISA, cut, tile and thread count; the split master is exact.
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/thread_pool.hpp"
#include "device/kernels.hpp"
#include "optim/optim_table.hpp"
#include "shard_state.hpp"
#include "test.hpp"
#include "zcomm/adam.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

AdamParams params_of(bool adamw, bool maximize, std::int64_t step) {
  return {.lr = 3e-3,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .adamw = adamw,
          .maximize = maximize,
          .step = step,
          .grad_scale = 0.75f};
}

struct Reference {
  std::vector<double> w, m, v;

  void step(const std::vector<double>& grad, const AdamParams& p) {
    for (std::size_t i = 0; i < w.size(); ++i) {
      double g = grad[i] * static_cast<double>(p.grad_scale) * (p.maximize ? -1 : 1);
      if (p.adamw) w[i] -= p.lr * p.weight_decay * w[i];
      if (!p.adamw) g += p.weight_decay * w[i];
      m[i] = p.beta1 * m[i] + (1 - p.beta1) * g;
      v[i] = p.beta2 * v[i] + (1 - p.beta2) * g * g;
      const auto t = static_cast<double>(p.step);
      const double m_hat = m[i] / (1 - std::pow(p.beta1, t)), v_hat = v[i] / (1 - std::pow(p.beta2, t));
      w[i] -= p.lr * m_hat / (std::sqrt(v_hat) + p.eps);
    }
  }
};

void compare_with_reference(DType weight, DType grad_dtype, bool adamw, bool maximize) {
  const std::size_t count = 2000;
  const auto start = random_floats(count, 1);
  State s = make_state(weight, 700, start);
  Reference reference{{start.begin(), start.end()}, std::vector<double>(count), std::vector<double>(count)};
  for (int t = 1; t <= 20; ++t) {
    const auto grad = gradient(count, grad_dtype, 100 + static_cast<unsigned>(t));
    std::vector<double> wide(count);
    device::cast(wide.data(), DType::float64, grad.data(), grad_dtype, count);
    adam_step(s.shard(grad.data(), grad_dtype), params_of(adamw, maximize, t));
    reference.step(wide, params_of(adamw, maximize, t));
  }
  const auto master = master_of(s);
  double worst = 0;
  for (std::size_t i = 0; i < count; ++i)
    worst = std::max(worst, std::abs(static_cast<double>(master[i]) - reference.w[i]));
  EXPECT_LT(worst, 4e-6);  // weights of about 1 to 4, 20 roundings of 2^-24 each and the update's
  EXPECT_GT(std::abs(reference.w[0] - static_cast<double>(start[0])), 1e-3);  // it moved
}

TEST(adam, follows_the_f64_reference) {
  for (const DType weight : kWeights)
    for (const DType grad : kGrads)
      for (const bool adamw : {true, false})
        for (const bool maximize : {true, false}) compare_with_reference(weight, grad, adamw, maximize);
}

void run_steps(State& s, DType grad_dtype, bool adamw, const std::vector<std::size_t>& cuts, int threads) {
  for (int t = 1; t <= 4; ++t) {
    const auto grad = gradient(s.count, grad_dtype, static_cast<unsigned>(t));
    OptimShard shard = s.shard(grad.data(), grad_dtype);
    for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
      shard.begin = cuts[k];
      shard.end = cuts[k + 1];
      adam_step(shard, params_of(adamw, false, t), threads);
    }
  }
}

TEST(adam, cuts_and_threads_do_not_change_bits) {
  ThreadPool::set_default_size(4);
  const std::size_t count = 70001;
  const auto start = random_floats(count, 5);
  for (const DType weight : kWeights)
    for (const DType grad : kGrads) {
      State whole = make_state(weight, 20000, start), cut = whole, threaded = whole;
      run_steps(whole, grad, true, {0, count}, 1);
      run_steps(cut, grad, true, {0, 1, 17, 19999, 20001, 40000, 69999, 69999, count}, 1);
      run_steps(threaded, grad, true, {0, count}, 0);
      EXPECT_TRUE(whole == cut);
      EXPECT_TRUE(whole == threaded);
    }
}

TEST(adam, tiles_do_not_change_bits) {
  const std::size_t count = 1003;
  const auto start = random_floats(count, 6);
  for (const bool adamw : {true, false})
    for (const DType weight : kWeights) {
      State one = make_state(weight, count + 1, start);
      run_steps(one, DType::bfloat16, adamw, {0, count}, 1);
      const auto expected = master_of(one);
      for (const std::size_t tile_count : {2u, 16u, 100u, 334u, 1002u}) {
        State s = make_state(weight, tile_count, start);
        run_steps(s, DType::bfloat16, adamw, {0, 5, 333, count}, 1);
        EXPECT_TRUE(master_of(s) == expected);
        EXPECT_TRUE(s.weight16 == one.weight16);
      }
    }
}

TEST(adam, state_lies_in_tiles_as_documented) {
  const std::size_t count = 23, tile_count = 10;
  const auto start = random_floats(count, 8);
  for (const DType weight : kWeights) {
    State s = make_state(weight, tile_count, start);
    const auto grad = gradient(count, DType::float32, 3);
    AdamParams params = params_of(true, false, 1);
    params.grad_scale = 1.0f;
    adam_step(s.shard(grad.data(), DType::float32), params);
    const auto master = master_of(s);
    const auto* state = reinterpret_cast<const std::byte*>(s.storage.data());
    const std::size_t bytes = weight == DType::bfloat16 ? 10 : 8;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t tile = i / tile_count * tile_count, n = std::min(tile_count, count - tile);
      float g, m, v;
      std::memcpy(&g, grad.data() + i * 4, 4);
      std::memcpy(&m, state + tile * bytes + (i - tile) * 4, 4);
      std::memcpy(&v, state + tile * bytes + (n + i - tile) * 4, 4);
      EXPECT_NEAR(m, 0.1f * g, 1e-6f);
      EXPECT_NEAR(v, 0.05f * g * g, 1e-6f);
      if (weight == DType::float32) continue;
      std::int16_t lo;
      std::memcpy(&lo, state + tile * bytes + 2 * n * 4 + (i - tile) * 2, 2);
      const std::uint32_t bits =
          (static_cast<std::uint32_t>(s.weight16[i]) << 16) + static_cast<std::uint32_t>(std::int32_t{lo});
      EXPECT_EQ(std::bit_cast<float>(bits), master[i]);
    }
  }
}

TEST(adam, bf16_weight_has_the_master_of_the_f32_weight) {
  const std::size_t count = 5000;
  const auto start = random_floats(count, 9);
  for (const DType grad : kGrads)
    for (const bool adamw : {true, false}) {
      State full = make_state(DType::float32, 512, start), half = make_state(DType::bfloat16, 512, start);
      run_steps(full, grad, adamw, {0, count}, 1);
      run_steps(half, grad, adamw, {0, count}, 1);
      EXPECT_TRUE(master_of(half) == full.weight);
    }
}

TEST(adam, every_isa_gives_equal_bits) {
  const auto& plain = optim::optim_table(Isa::plain);
  for (const Isa isa : kIsas) {
    if (isa > best_isa()) continue;
    const auto& table = optim::optim_table(isa);
    for (const DType weight : kWeights)
      for (const DType grad_dtype : kGrads)
        for (const bool adamw : {true, false})
          for (std::size_t count = 1; count <= 2100; count += count < 70 ? 1 : 507) {
            const auto start = random_floats(count, static_cast<unsigned>(count));
            const auto grad = gradient(count, grad_dtype, 2);
            optim::AdamFactors f{0.75f, 0.9997f, 0.1f, 0.1f, 0.95f, 0.05f, 0.223606f, 1e-8f, 3e-2f, adamw};
            State expected = make_state(weight, count, start), s = expected;
            for (State* state : {&expected, &s}) {
              auto* m = state->storage.data();
              for (std::size_t i = 0; i < count; ++i) m[i] = start[i] * 0.01f, m[count + i] = start[i] * start[i];
              auto* lo = weight == DType::bfloat16 ? reinterpret_cast<std::int16_t*>(m + 2 * count) : nullptr;
              for (std::size_t i = 0; lo != nullptr && i < count; i += 5) {  // zeros that a program wrote
                state->weight16[i] = i % 2 == 0 ? 0 : 0x8000;
                lo[i] = static_cast<std::int16_t>(-1 - static_cast<int>(i));
              }
              const optim::OptimPiece piece{
                  state->shard(nullptr, grad_dtype).weight, lo, {m, m + count}, grad.data(), grad_dtype, count};
              (state == &s ? table : plain).adam(piece, f);
            }
            if (!(s == expected))
              return test::fail(__FILE__, __LINE__, std::string(name_of(isa)) + " differs from plain");
            for (const std::uint16_t high : s.weight16) EXPECT_LE(high & 0x7fff, 0x7f80);  // none is NaN
          }
  }
}

TEST(split_master, is_exact_for_any_bits) {
  std::mt19937_64 random(3);
  std::vector<float> master(200000);
  for (float& x : master) x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  std::size_t next = 0;
  for (const std::uint32_t high : {0x0000u, 0x0001u, 0x3f80u, 0x3f81u, 0x7f7fu, 0x7f80u, 0x8000u, 0xbf80u, 0xff7fu})
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      master[next++] = std::bit_cast<float>(high << 16 | low);
  const std::size_t count = master.size();
  for (const Isa isa : kIsas) {
    if (isa > best_isa()) continue;
    std::vector<std::uint16_t> weight(count);
    std::vector<std::int16_t> lo(count);
    std::vector<float> back(count);
    optim::optim_table(isa).split(weight.data(), lo.data(), master.data(), count);
    optim::optim_table(isa).join(back.data(), weight.data(), lo.data(), count);
    std::size_t wrong = 0, away = 0;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t nearest;
      device::cast(&nearest, DType::bfloat16, &master[i], DType::float32, 1);
      if (std::isnan(master[i])) {
        wrong += !std::isnan(back[i]) || weight[i] != nearest;
        continue;
      }
      wrong += std::bit_cast<std::uint32_t>(back[i]) != std::bit_cast<std::uint32_t>(master[i]);
      const bool tie = (std::bit_cast<std::uint32_t>(master[i]) & 0xffff) == 0x8000;
      away += weight[i] != nearest;
      wrong += weight[i] != nearest && !(tie && weight[i] == nearest + 1);  // only ties differ, away from zero
    }
    EXPECT_EQ(wrong, 0u);
    EXPECT_GT(away, 0u);
  }
}

TEST(split_master, a_weight_that_was_written_counts) {
  std::mt19937_64 random(4);
  const std::size_t count = 4096;
  std::vector<std::uint16_t> weight(count);
  std::vector<std::int16_t> lo(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t written[] = {0, 0x8000, 0x7f80, 0xff80, 0x3f80, 0x0001};
    weight[i] = written[i % 6];
    lo[i] = static_cast<std::int16_t>(random());
  }
  for (const Isa isa : kIsas) {
    if (isa > best_isa()) continue;
    std::vector<float> master(count);
    optim::optim_table(isa).join(master.data(), weight.data(), lo.data(), count);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t rounded;
      std::int16_t rest;
      optim::optim_table(isa).split(&rounded, &rest, &master[i], 1);
      EXPECT_EQ(rounded, weight[i]);
    }
  }
}

TEST(adam, refuses_what_it_cannot_do) {
  float weight[4] = {}, grad[4] = {}, storage[16] = {};
  auto* state = reinterpret_cast<std::byte*>(storage);
  const OptimShard good{weight, DType::float32, grad, DType::float32, state, 4, 4, 0, 4};
  const auto with = [&](auto change) {
    OptimShard shard = good;
    AdamParams params;
    change(shard, params);
    adam_step(shard, params);
  };
  using S = OptimShard;
  using P = AdamParams;
  EXPECT_THROW_WITH(with([](S& s, P&) { s.weight_dtype = DType::float64; }), InvalidArgument, "weight is float64");
  EXPECT_THROW_WITH(with([](S& s, P&) { s.grad_dtype = DType::int32; }), InvalidArgument, "grad is int32");
  EXPECT_THROW_WITH(with([](S& s, P&) { s.end = 5; }), InvalidArgument, "[0, 5)");
  EXPECT_THROW_WITH(with([](S& s, P&) { s.begin = 3, s.end = 2; }), InvalidArgument, "[3, 2)");
  EXPECT_THROW_WITH(with([](S& s, P&) { s.tile_count = 0; }), InvalidArgument, "tile_count is 0");
  EXPECT_THROW_WITH(with([](S& s, P&) { s.weight_dtype = DType::bfloat16, s.tile_count = 3; }), InvalidArgument,
                    "tile_count 3");
  EXPECT_THROW_WITH(with([](S& s, P&) { s.grad = nullptr; }), InvalidArgument, "grad is null");
  EXPECT_THROW_WITH(with([](S& s, P&) { s.weight = nullptr; }), InvalidArgument, "weight is null");
  EXPECT_THROW_WITH(with([](S& s, P&) { s.state += 1; }), InvalidArgument, "not aligned");
  EXPECT_THROW_WITH(with([](S&, P& p) { p.beta1 = 1.0; }), InvalidArgument, "beta 1");
  EXPECT_THROW_WITH(with([](S&, P& p) { p.beta2 = -0.5; }), InvalidArgument, "beta -0.5");
  EXPECT_THROW_WITH(with([](S&, P& p) { p.step = 0; }), InvalidArgument, "step 0");
  EXPECT_THROW_WITH(adam_state_nbytes(DType::int8, 1), InvalidArgument, "weight is int8");
  EXPECT_THROW_WITH(split_master(good, weight), InvalidArgument, "only bfloat16 and float16");
  EXPECT_EQ(adam_state_nbytes(DType::float32, 10), 80u);
  EXPECT_EQ(adam_state_nbytes(DType::bfloat16, 10), 100u);
}

TEST(adam, f16_weight_has_the_master_of_the_f32_weight) {
  const auto start = random_floats(20001, 11);
  for (const DType state : {DType::float32, DType::bfloat16, DType::uint8}) {
    State full = make_state(DType::float32, 5120, start, 2, state);
    std::vector<std::uint16_t> weight(start.size());
    std::vector<float> storage((12 * start.size() + 1024) / 4);
    OptimShard half{
        weight.data(), DType::float16, nullptr, DType::float16, reinterpret_cast<std::byte*>(storage.data()),
        start.size(),  5120,           0,       start.size(),   state};
    split_master(half, start.data());
    for (int t = 1; t <= 3; ++t) {
      const auto grad = gradient(start.size(), DType::float16, static_cast<unsigned>(t));
      half.grad = grad.data();
      adam_step(half, {.lr = 1e-2, .step = t});
      adam_step(full.shard(grad.data(), DType::float16), {.lr = 1e-2, .step = t}, 1);
    }
    std::vector<float> master(start.size());
    join_master(half, master.data());
    EXPECT_TRUE(master == full.weight);
    std::vector<std::uint16_t> rounded(start.size());
    device::cast(rounded.data(), DType::float16, master.data(), DType::float32, master.size());
    EXPECT_TRUE(weight == rounded);
  }
}

TEST(adam, squares_are_those_of_the_gradient) {
  const std::size_t count = 300000;
  for (const DType dtype : kGrads) {
    State with = make_state(DType::float32, count, random_floats(count, 1)), without = with;
    auto grad = gradient(count, dtype, 3);
    ExactSum sum, expected;
    adam_step(with.shard(grad.data(), dtype), {.grad_scale = 0.5f}, 0, &sum);
    adam_step(without.shard(grad.data(), dtype), {.grad_scale = 0.5f});
    add_squares(expected, grad.data(), dtype, count);
    EXPECT_EQ(sum.value(), expected.value());
    EXPECT_TRUE(with == without);
    std::memset(grad.data() + 777 * size_of(dtype), 0xff, size_of(dtype));  // NaN
    adam_step(with.shard(grad.data(), dtype), {}, 0, &sum);
    EXPECT_TRUE(std::isnan(sum.value()));
  }
}

}  // namespace
}  // namespace zcomm
