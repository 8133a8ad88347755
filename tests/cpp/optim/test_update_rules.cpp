// SGD, Lion, Adagrad: against f64 references; equal bits on every cut, tile, thread count and, with Adam, every ISA;
// a bf16 weight with its remainder is the f32 weight.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "flush.hpp"
#include "optim/optim_table.hpp"
#include "shard_state.hpp"
#include "test.hpp"
#include "zcomm/adagrad.hpp"
#include "zcomm/error.hpp"
#include "zcomm/lion.hpp"
#include "zcomm/sgd.hpp"

namespace zcomm {
namespace {

constexpr float kGradScale = 0.75f;

/// One optimizer with its options: a step of the core, and the same on one element in f64 (t counts from 1).
struct Rule {
  std::string name;
  int arrays;
  std::function<void(const OptimShard& shard, int t, int threads)> step;
  std::function<void(double& w, double& state, double g, int t)> reference;
};

Rule sgd_rule(double momentum, double dampening, bool nesterov, bool maximize) {
  const SgdParams p{.lr = 0.05,
                    .momentum = momentum,
                    .dampening = dampening,
                    .weight_decay = 0.1,
                    .nesterov = nesterov,
                    .maximize = maximize,
                    .buffer = momentum != 0.0,
                    .grad_scale = kGradScale};
  return {"sgd " + std::to_string(momentum) + (nesterov ? " nesterov" : ""), p.buffer ? 1 : 0,
          [p](const OptimShard& shard, int t, int threads) {
            SgdParams now = p;
            now.first = t == 1;
            sgd_step(shard, now, threads);
          },
          [p](double& w, double& buffer, double g, int t) {
            g = g * kGradScale * (p.maximize ? -1 : 1) + p.weight_decay * w;
            buffer = t == 1 ? g : p.momentum * buffer + (1 - p.dampening) * g;
            w -= p.lr * (p.momentum == 0 ? g : p.nesterov ? g + p.momentum * buffer : buffer);
          }};
}

Rule lion_rule(bool maximize) {
  const LionParams p{.lr = 1e-3, .weight_decay = 0.1, .maximize = maximize, .grad_scale = kGradScale};
  return {"lion", 1, [p](const OptimShard& shard, int, int threads) { lion_step(shard, p, threads); },
          [p](double& w, double& m, double g, int) {
            g *= kGradScale * (p.maximize ? -1 : 1);
            const double c = p.beta1 * m + (1 - p.beta1) * g;
            w = w * (1 - p.lr * p.weight_decay) - p.lr * (c > 0 ? 1 : c < 0 ? -1 : 0);
            m = p.beta2 * m + (1 - p.beta2) * g;
          }};
}

Rule adagrad_rule(double lr_decay, bool maximize) {
  const AdagradParams p{
      .lr = 0.02, .lr_decay = lr_decay, .weight_decay = 0.1, .maximize = maximize, .grad_scale = kGradScale};
  return {"adagrad", 1,
          [p](const OptimShard& shard, int t, int threads) {
            AdagradParams now = p;
            now.step = t;
            adagrad_step(shard, now, threads);
          },
          [p](double& w, double& sum, double g, int t) {
            g = g * kGradScale * (p.maximize ? -1 : 1) + p.weight_decay * w;
            sum += g * g;
            w -= p.lr / (1 + (t - 1) * p.lr_decay) * g / (std::sqrt(sum) + p.eps);
          }};
}

std::vector<Rule> rules() {
  std::vector<Rule> out;
  for (const bool maximize : {false, true}) {
    for (const bool nesterov : {false, true}) out.push_back(sgd_rule(0.9, 0.0, nesterov, maximize));
    out.push_back(sgd_rule(0.0, 0.0, false, maximize));
    out.push_back(sgd_rule(0.8, 0.3, false, maximize));
    out.push_back(lion_rule(maximize));
    out.push_back(adagrad_rule(0.0, maximize));
    out.push_back(adagrad_rule(0.1, maximize));
  }
  return out;
}

void compare_with_reference(const Rule& rule, DType weight, DType grad_dtype) {
  const std::size_t count = 1500;
  const auto start = random_floats(count, 1);
  State s = make_state(weight, 700, start, rule.arrays);
  std::vector<double> w(start.begin(), start.end()), state(count), wide(count);
  for (int t = 1; t <= 20; ++t) {
    const auto grad = gradient(count, grad_dtype, 100 + static_cast<unsigned>(t));
    device::cast(wide.data(), DType::float64, grad.data(), grad_dtype, count);
    rule.step(s.shard(grad.data(), grad_dtype), t, 0);
    for (std::size_t i = 0; i < count; ++i) rule.reference(w[i], state[i], wide[i], t);
  }
  const auto master = master_of(s);
  double worst = 0, moved = 0;
  for (std::size_t i = 0; i < count; ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(master[i]) - w[i]));
    moved = std::max(moved, std::abs(w[i] - static_cast<double>(start[i])));
  }
  if (!(worst < 4e-6)) test::fail(__FILE__, __LINE__, rule.name + " is off by " + test::show(worst));
  EXPECT_GT(moved, 1e-3);
}

TEST(update_rules, follow_the_f64_reference) {
  for (const Rule& rule : rules())
    for (const DType weight : kWeights)
      for (const DType grad : kGrads) compare_with_reference(rule, weight, grad);
}

void run_steps(const Rule& rule, State& s, DType grad_dtype, const std::vector<std::size_t>& cuts, int threads) {
  for (int t = 1; t <= 3; ++t) {
    const auto grad = gradient(s.count, grad_dtype, static_cast<unsigned>(t));
    OptimShard shard = s.shard(grad.data(), grad_dtype);
    for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
      shard.begin = cuts[k];
      shard.end = cuts[k + 1];
      rule.step(shard, t, threads);
    }
  }
}

TEST(update_rules, cuts_and_threads_do_not_change_bits) {
  const std::size_t count = 40001;
  const auto start = random_floats(count, 5);
  for (const Rule& rule : rules())
    for (const DType weight : kWeights) {
      State whole = make_state(weight, 15000, start, rule.arrays), cut = whole, threaded = whole;
      run_steps(rule, whole, DType::bfloat16, {0, count}, 1);
      run_steps(rule, cut, DType::bfloat16, {0, 1, 17, 14999, 15001, 30000, 39999, 39999, count}, 1);
      run_steps(rule, threaded, DType::bfloat16, {0, count}, 0);
      EXPECT_TRUE(whole == cut);
      EXPECT_TRUE(whole == threaded);
    }
}

TEST(update_rules, tiles_do_not_change_bits) {
  const std::size_t count = 1003;
  const auto start = random_floats(count, 6);
  for (const Rule& rule : rules())
    for (const DType weight : kWeights) {
      State one = make_state(weight, count + 1, start, rule.arrays);
      run_steps(rule, one, DType::float32, {0, count}, 1);
      for (const std::size_t tile_count : {2u, 16u, 334u, 1002u}) {
        State s = make_state(weight, tile_count, start, rule.arrays);
        run_steps(rule, s, DType::float32, {0, 5, 333, count}, 1);
        EXPECT_TRUE(master_of(s) == master_of(one));
        EXPECT_TRUE(s.weight16 == one.weight16);
      }
    }
}

TEST(update_rules, bf16_weight_has_the_master_of_the_f32_weight) {
  const std::size_t count = 3000;
  const auto start = random_floats(count, 9);
  for (const Rule& rule : rules())
    for (const DType grad : kGrads) {
      State full = make_state(DType::float32, 512, start, rule.arrays);
      State half = make_state(DType::bfloat16, 512, start, rule.arrays);
      run_steps(rule, full, grad, {0, count}, 1);
      run_steps(rule, half, grad, {0, count}, 1);
      EXPECT_TRUE(master_of(half) == full.weight);
    }
}

// -- every ISA, every count around the vector width, and numbers that are not normal

using Kernel = std::function<void(const optim::OptimTable&, const optim::OptimPiece&)>;

std::vector<Kernel> kernels() {
  using optim::OptimPiece, optim::OptimTable;
  std::vector<Kernel> out;
  for (const bool adamw : {true, false}) {
    const optim::AdamFactors f{0.75f, 0.9997f, 0.1f, 0.1f, 0.95f, 0.05f, 0.223606f, 1e-8f, 3e-2f, adamw};
    out.emplace_back([f](const OptimTable& table, const OptimPiece& piece) { table.adam(piece, f); });
  }
  for (const int kind : {0, 1, 2}) {
    const optim::SgdFactors f{-0.75f, 0.1f, 0.9f, 0.7f, 0.9f, 0.03f, kind > 0, kind > 1};
    out.emplace_back([f](const OptimTable& table, const OptimPiece& piece) { table.sgd(piece, f); });
  }
  const optim::LionFactors lion{0.75f, 0.9997f, 0.9f, 0.1f, 0.99f, 0.01f, 3e-3f};
  out.emplace_back([lion](const OptimTable& table, const OptimPiece& piece) { table.lion(piece, lion); });
  const optim::AdagradFactors adagrad{0.75f, 0.1f, 1e-10f, 0.03f};
  out.emplace_back([adagrad](const OptimTable& table, const OptimPiece& piece) { table.adagrad(piece, adagrad); });
  return out;
}

/// Random numbers of all sizes; every third (by chance) is zero, subnormal, infinite, the largest, or NaN.
std::vector<float> odd_floats(std::size_t count, unsigned seed) {
  using Limits = std::numeric_limits<float>;
  const float odd[] = {0.0f,
                       -0.0f,
                       Limits::denorm_min(),
                       -Limits::denorm_min(),
                       1e-40f,
                       -3e-39f,
                       Limits::min(),
                       Limits::max(),
                       -Limits::max(),
                       Limits::infinity(),
                       -Limits::infinity(),
                       Limits::quiet_NaN(),
                       1e-20f,
                       -1e-20f,
                       1.0f};
  std::mt19937 random(seed);
  auto out = random_floats(count, seed);
  for (float& x : out)
    x = random() % 3 == 0 ? odd[random() % std::size(odd)] : std::ldexp(x, static_cast<int>(random() % 40) - 30);
  return out;
}

/// Equal bits, or both NaN: see [Note: optimizer bits].
bool same_number(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

struct Arrays {
  std::vector<float> w32, state[2];
  std::vector<std::uint16_t> w16;
  std::vector<std::int16_t> lo;

  explicit Arrays(std::size_t count, unsigned seed) : w32(odd_floats(count, seed)), w16(count), lo(count) {
    state[0] = odd_floats(count, seed + 1);
    state[1] = odd_floats(count, seed + 2);
    for (float& v : state[1]) v = std::abs(v);
    optim::optim_table(Isa::plain).split(w16.data(), lo.data(), w32.data(), count);
  }

  optim::OptimPiece piece(DType weight, const void* grad, DType grad_dtype) {
    const bool split = weight == DType::bfloat16;
    return {split ? static_cast<void*>(w16.data()) : w32.data(),
            split ? lo.data() : nullptr,
            {state[0].data(), state[1].data()},
            grad,
            grad_dtype,
            w32.size()};
  }

  bool same(const Arrays& other) const {
    std::vector<float> a(w16.size()), b(w16.size());  // joined on one ISA
    optim::optim_table(Isa::plain).join(a.data(), w16.data(), lo.data(), a.size());
    optim::optim_table(Isa::plain).join(b.data(), other.w16.data(), other.lo.data(), b.size());
    return std::equal(a.begin(), a.end(), b.begin(), same_number) &&
           std::equal(w32.begin(), w32.end(), other.w32.begin(), same_number) &&
           std::equal(state[0].begin(), state[0].end(), other.state[0].begin(), same_number) &&
           std::equal(state[1].begin(), state[1].end(), other.state[1].begin(), same_number);
  }
};

void compare_with_plain(Isa isa, const Kernel& kernel, DType weight, DType grad_dtype, std::size_t count) {
  const auto seed = static_cast<unsigned>(count);
  const auto wide = odd_floats(count, seed + 7);
  std::vector<std::byte> grad(count * 4 + 1);
  device::cast(grad.data(), grad_dtype, wide.data(), DType::float32, count);
  Arrays expected(count, seed), got(count, seed);
  for (int step = 0; step < 2; ++step) {
    kernel(optim::optim_table(Isa::plain), expected.piece(weight, grad.data(), grad_dtype));
    kernel(optim::optim_table(isa), got.piece(weight, grad.data(), grad_dtype));
  }
  if (!got.same(expected))
    test::fail(__FILE__, __LINE__, std::string(name_of(isa)) + " differs from plain at count " + std::to_string(count));
}

TEST(update_rules, every_isa_gives_equal_bits) {
  std::vector<std::size_t> counts;
  for (std::size_t count = 0; count <= 66; ++count) counts.push_back(count);
  for (const std::size_t near : {127u, 255u, 511u, 999u, 1023u})
    counts.insert(counts.end(), {near, near + 1, near + 2});
  for (const Isa isa : kIsas) {
    if (isa > best_isa() || isa == Isa::plain) continue;
    for (const Kernel& kernel : kernels())
      for (const DType weight : kWeights)
        for (const DType grad : kGrads)
          for (const std::size_t count : counts) compare_with_plain(isa, kernel, weight, grad, count);
  }
}

TEST(update_rules, nan_and_inf_stay_in_their_element) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const Rule& rule : rules())
    for (const DType weight : kWeights) {
      std::vector<float> grad(40, 0.5f);
      State clean = make_state(weight, 40, random_floats(40, 3), rule.arrays), s = clean;
      rule.step(clean.shard(grad.data(), DType::float32), 1, 1);
      grad[7] = nan, grad[20] = inf;
      rule.step(s.shard(grad.data(), DType::float32), 1, 1);
      const auto expected = master_of(clean), master = master_of(s);
      for (std::size_t i = 0; i < 40; ++i) {
        if (i != 7 && i != 20) EXPECT_EQ(master[i], expected[i]);
      }
      EXPECT_TRUE(std::isnan(master[7]));
      EXPECT_EQ(std::isfinite(master[20]), rule.name.starts_with("lion"));  // which uses only the sign
    }
}

TEST(update_rules, subnormals_are_kept_whatever_the_caller_does_with_them) {
  constexpr std::size_t count = 100000;  // parts for several threads
  const auto tiny = random_floats(count, 3, 1e-39f), start = random_floats(count, 4, 1e-38f);
  for (const Rule& rule : rules())
    for (const DType weight : kWeights) {
      State kept = make_state(weight, count, start, rule.arrays), s = kept;
      for (int t = 1; t <= 2; ++t) rule.step(kept.shard(tiny.data(), DType::float32), t, 0);
      const test::FlushSubnormals flush;
      for (int t = 1; t <= 2; ++t) rule.step(s.shard(tiny.data(), DType::float32), t, 0);
      EXPECT_TRUE(s == kept);
    }
}

TEST(update_rules, momentum_off_leaves_the_buffer_alone) {
  const auto start = random_floats(100, 2);
  const auto grad = gradient(100, DType::float32, 4);
  for (const DType weight : kWeights) {
    State s = make_state(weight, 30, start, 1), without = make_state(weight, 30, start, 0);
    SgdParams p{.lr = 0.1, .momentum = 0.9, .buffer = true, .first = true};
    sgd_step(s.shard(grad.data(), DType::float32), p);
    sgd_step(without.shard(grad.data(), DType::float32), {.lr = 0.1});  // the first step is the same
    EXPECT_TRUE(master_of(s) == master_of(without));
    const float buffer = s.storage[0];
    p.momentum = 0, p.first = false;
    sgd_step(s.shard(grad.data(), DType::float32), p);
    sgd_step(without.shard(grad.data(), DType::float32), {.lr = 0.1});
    EXPECT_TRUE(master_of(s) == master_of(without));
    EXPECT_EQ(s.storage[0], buffer);
    EXPECT_NE(buffer, 0.0f);
  }
}

TEST(update_rules, refuse_what_they_cannot_do) {
  float weight[4] = {}, grad[4] = {}, storage[8] = {};
  const OptimShard good{weight, DType::float32, grad, DType::float32, reinterpret_cast<std::byte*>(storage), 4, 4, 0,
                        4};
  OptimShard bad = good;
  bad.grad_dtype = DType::int32;
  EXPECT_THROW_WITH(sgd_step(bad, {}), InvalidArgument, "sgd: grad is int32");
  EXPECT_THROW_WITH(lion_step(bad, {}), InvalidArgument, "lion: grad is int32");
  EXPECT_THROW_WITH(adagrad_step(bad, {}), InvalidArgument, "adagrad: grad is int32");
  bad = good;
  bad.state = nullptr;
  sgd_step(bad, {});  // plain SGD in f32 has no state
  EXPECT_THROW_WITH(lion_step(bad, {}), InvalidArgument, "lion: state is null");
  EXPECT_THROW_WITH(sgd_step(bad, {.momentum = 0.9, .buffer = true}), InvalidArgument, "sgd: state is null");
  EXPECT_THROW_WITH(sgd_step(good, {.momentum = 0.9}), InvalidArgument, "sgd: momentum 0.9");
  EXPECT_THROW_WITH(lion_step(good, {.beta2 = 1.0}), InvalidArgument, "lion: beta 1");
  EXPECT_THROW_WITH(adagrad_step(good, {.step = 0}), InvalidArgument, "adagrad: step 0");
  EXPECT_THROW_WITH(split_master(good, weight, 3), InvalidArgument, "arrays 3");
  EXPECT_THROW_WITH(lion_state_nbytes(DType::float64, 1), InvalidArgument, "lion: weight is float64");
  EXPECT_EQ(sgd_state_nbytes(DType::float32, false, 10), 0u);
  EXPECT_EQ(sgd_state_nbytes(DType::bfloat16, false, 10), 20u);
  EXPECT_EQ(sgd_state_nbytes(DType::bfloat16, true, 10), 60u);
  EXPECT_EQ(lion_state_nbytes(DType::float32, 10), 40u);
  EXPECT_EQ(adagrad_state_nbytes(DType::bfloat16, 10), 60u);
}

}  // namespace
}  // namespace zcomm
