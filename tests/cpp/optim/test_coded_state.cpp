// Adam with 8-bit state: a code's largest error, right means, one result on every CPU, neighbours of nonfinite
// elements.
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "device/kernels.hpp"
#include "optim/arithmetic/adam_factors.hpp"
#include "optim/optim_table.hpp"
#include "shard_state.hpp"
#include "test.hpp"
#include "zcomm/adam.hpp"
#include "zcomm/error.hpp"
#include "zcomm/lion.hpp"

namespace zcomm {
namespace {

constexpr std::size_t kBlock = optim::kStateBlock;
const float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

State coded_state(DType weight, std::size_t tile_count, const std::vector<float>& master) {
  return make_state(weight, tile_count, master, 2, DType::uint8);
}

struct Averages {
  std::vector<float> m, v;
};

Averages averages_of(State& s) {
  Averages out{std::vector<float>(s.count), std::vector<float>(s.count)};
  adam_decode_state(s.shard(nullptr, DType::float32), out.m.data(), out.v.data());
  return out;
}

/// Magnitudes over many octaves, both signs, some zeros.
std::vector<float> wide_range(std::size_t count, unsigned seed, float octaves) {
  auto out = random_floats(count, seed);
  const auto power = random_floats(count, seed + 1);
  for (std::size_t i = 0; i < count; ++i)
    out[i] = i % 13 == 5 ? 0.0f : std::copysign(std::exp2(-octaves * std::abs(power[i])), out[i]);
  return out;
}

/// How far a code may be from a value that is `share` of the block's largest: half a cell.
double half_cell(double share, double octaves_per_level) {
  const double level = std::floor(-std::log2(share) / octaves_per_level);
  return share * std::exp2(level) / 32.0;
}

TEST(coded_state, codes_are_as_near_as_they_say) {
  const std::size_t count = 40 * kBlock + 77;
  State s = coded_state(DType::float32, count, std::vector<float>(count));
  const auto m = wide_range(count, 3, 4.0f);
  auto v = wide_range(count, 5, 8.0f);
  for (float& x : v) x = std::abs(x);
  adam_encode_state(s.shard(nullptr, DType::float32), m.data(), v.data());
  const Averages out = averages_of(s);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    double most_m = 0, most_v = 0;
    const std::size_t end = std::min(count, begin + kBlock);
    for (std::size_t i = begin; i < end; ++i) {
      most_m = std::max(most_m, std::abs(static_cast<double>(m[i])));
      most_v = std::max(most_v, static_cast<double>(v[i]));
    }
    for (std::size_t i = begin; i < end; ++i) {
      const double share_m = std::abs(static_cast<double>(m[i])) / most_m, share_v = static_cast<double>(v[i]) / most_v;
      if (m[i] == 0) EXPECT_EQ(out.m[i], 0.0f);
      if (share_m > 0x1p-12) EXPECT_NEAR(out.m[i] / most_m, m[i] / most_m, 1.1 * half_cell(share_m, 4));
      if (share_v > 0x1p-24) EXPECT_NEAR(out.v[i] / most_v, v[i] / most_v, 1.1 * half_cell(share_v, 8));
      EXPECT_TRUE((v[i] > 0) == (out.v[i] > 0));  // a step divides by its root
    }
  }
}

TEST(coded_state, what_was_decoded_is_encoded_to_the_same) {
  const std::size_t count = 10 * kBlock + 3;
  State s = coded_state(DType::float32, count, std::vector<float>(count));
  const auto m = wide_range(count, 1, 6.0f);
  auto v = m;
  for (float& x : v) x = x * x;
  adam_encode_state(s.shard(nullptr, DType::float32), m.data(), v.data());
  const Averages once = averages_of(s);
  adam_encode_state(s.shard(nullptr, DType::float32), once.m.data(), once.v.data());
  const Averages twice = averages_of(s);
  for (std::size_t i = 0; i < count; ++i) {
    EXPECT_NEAR(twice.m[i], once.m[i], 3e-6 * std::abs(once.m[i]));
    EXPECT_NEAR(twice.v[i], once.v[i], 3e-6 * once.v[i]);
  }
}

TEST(coded_state, rounding_has_the_right_mean) {
  const std::size_t count = 64 * kBlock;
  const int steps = 400;
  std::vector<double> mean_m(kBlock), mean_v(kBlock);
  const auto pattern = random_floats(kBlock, 8);
  std::vector<float> grad(count);
  for (std::size_t i = 0; i < count; ++i) grad[i] = pattern[i % kBlock];
  for (int t = 1; t <= steps; ++t) {  // beta = 0.5 from zero: m = g / 2, v = g * g / 2, in every block
    State s = coded_state(DType::float32, count, std::vector<float>(count));
    adam_step(s.shard(grad.data(), DType::float32), {.beta1 = 0.5, .beta2 = 0.5, .step = t});
    const Averages out = averages_of(s);
    for (std::size_t i = 0; i < count; ++i) {
      mean_m[i % kBlock] += static_cast<double>(out.m[i]) / (steps * 64);
      mean_v[i % kBlock] += static_cast<double>(out.v[i]) / (steps * 64);
    }
  }
  const double most = 4.0;
  for (std::size_t i = 0; i < kBlock;
       ++i) {  // chance has 8 bits: half of 1/256 of a cell, which is a 16th, is its bias
    const double m = static_cast<double>(pattern[i]) / 2, v = 2 * m * m;
    EXPECT_NEAR(mean_m[i], m, std::abs(m) * 2e-3 + most * 1e-4);
    EXPECT_NEAR(mean_v[i], v, v * 2e-3 + most * most * 1e-5);
  }
}

TEST(coded_state, slow_averages_follow_f64_in_the_mean) {
  const std::size_t count = 32 * kBlock;
  State s = coded_state(DType::float32, count, std::vector<float>(count));
  AdamParams p{.lr = 0.0, .beta1 = 0.99, .beta2 = 0.999};
  double m[2] = {}, v[2] = {};
  for (p.step = 1; p.step <= 1500; ++p.step) {
    std::vector<float> grad(count);
    for (std::size_t which : {0u, 1u}) {  // one element of a block keeps its gradient, the others' falls to a half
      const double g = which == 0 || p.step <= 500 ? 1.0 : 0.5;
      for (std::size_t i = 0; i < count; ++i)
        if ((i % kBlock != 0) == (which == 1)) grad[i] = static_cast<float>(g);
      m[which] = p.beta1 * m[which] + (1 - p.beta1) * g;
      v[which] = p.beta2 * v[which] + (1 - p.beta2) * g * g;
    }
    adam_step(s.shard(grad.data(), DType::float32), p);
  }
  const Averages out = averages_of(s);
  double mean_m = 0, mean_v = 0, n = 0;
  for (std::size_t i = 0; i < count; ++i)
    if (i % kBlock != 0) mean_m += out.m[i], mean_v += out.v[i], ++n;
  EXPECT_NEAR(mean_m / n / m[1], 1.0, 1e-2);
  EXPECT_NEAR(mean_v / n / v[1], 1.0, 2e-2);  // rounded to nearest it would not change: off by more than 1
}

TEST(coded_state, cuts_tiles_and_threads_do_not_change_bits) {
  const std::size_t count = 196 * kBlock + 1;
  const auto start = random_floats(count, 5);
  for (const std::uint64_t first : {std::uint64_t{0}, (std::uint64_t{1} << 32) - 2000, std::uint64_t{1} << 40})
    for (const DType weight : kWeights) {
      State whole = coded_state(weight, 80 * kBlock, start), cut = whole, threaded = whole;
      adam_in_cuts(whole, {0, count}, 1, first);
      adam_in_cuts(cut, {0, kBlock, 3 * kBlock, 79 * kBlock, 81 * kBlock, 160 * kBlock, 160 * kBlock, count}, 1, first);
      adam_in_cuts(threaded, {0, count}, 0, first);
      EXPECT_TRUE(whole == cut);
      EXPECT_TRUE(whole == threaded);
      State tiled = coded_state(weight, 13 * kBlock, start), other = coded_state(weight, 80 * kBlock, start);
      adam_in_cuts(tiled, {0, count}, 1, first);
      EXPECT_TRUE(master_of(tiled) == master_of(whole));
      adam_in_cuts(other, {0, count}, 1, first + 1);
      EXPECT_FALSE(other == whole);  // chance is of the index
    }
}

TEST(coded_state, bf16_weight_has_the_master_of_the_f32_weight) {
  const auto start = random_floats(3000, 9);
  State full = coded_state(DType::float32, 512, start), half = coded_state(DType::bfloat16, 512, start);
  adam_in_cuts(full, {0, 3000}, 1);
  adam_in_cuts(half, {0, 3000}, 1);
  EXPECT_TRUE(master_of(half) == full.weight);
}

TEST(coded_state, follows_f64_adam) {
  const std::size_t count = 5 * kBlock + 100;
  const auto start = random_floats(count, 4);
  State s = coded_state(DType::float32, count, start);
  std::vector<double> w(start.begin(), start.end()), m(count), v(count);
  const double lr = 1e-3, b1 = 0.9, b2 = 0.999;
  for (int t = 1; t <= 100; ++t) {
    const auto grad = random_floats(count, static_cast<unsigned>(100 + t));
    adam_step(s.shard(grad.data(), DType::float32), {.lr = lr, .step = t});
    for (std::size_t i = 0; i < count; ++i) {
      const auto g = static_cast<double>(grad[i]);
      m[i] = b1 * m[i] + (1 - b1) * g;
      v[i] = b2 * v[i] + (1 - b2) * g * g;
      w[i] -= lr * m[i] / (1 - std::pow(b1, t)) / (std::sqrt(v[i] / (1 - std::pow(b2, t))) + 1e-8);
    }
  }
  double square = 0, length = 0;
  for (std::size_t i = 0; i < count; ++i) {
    square += std::pow(w[i] - static_cast<double>(s.weight[i]), 2);
    length += std::pow(w[i] - static_cast<double>(start[i]), 2);
  }
  EXPECT_LT(std::sqrt(square / length), 0.08);  // of the way that the weights went; a random walk
}

TEST(coded_state, what_is_not_finite_stays_alone) {
  const std::size_t count = 3 * kBlock + 5;
  const auto start = random_floats(count, 6), good = random_floats(count, 7);
  State clean = coded_state(DType::float32, count, start), s = clean;
  auto bad = good;
  bad[3] = kInfinity, bad[kBlock + 200] = kNan, bad[3 * kBlock + 1] = 1e30f;  // v overflows, m does not
  for (int t = 1; t <= 20; ++t) {
    adam_step(s.shard((t == 5 ? bad : good).data(), DType::float32), {.lr = 1e-3, .step = t});
    adam_step(clean.shard(good.data(), DType::float32), {.lr = 1e-3, .step = t});
  }
  const Averages out = averages_of(s), expected = averages_of(clean);
  for (std::size_t i = 0; i < count; ++i)
    if (i == 3 || i == kBlock + 200 || i == 3 * kBlock + 1) {
      EXPECT_TRUE(std::isnan(s.weight[i]) && std::isnan(out.m[i]) && std::isnan(out.v[i]));
    } else {
      EXPECT_NEAR(s.weight[i], clean.weight[i], 2e-3);
      EXPECT_NEAR(out.v[i], expected.v[i], 0.2f * expected.v[i] + 1e-6f);
    }
}

TEST(coded_state, what_has_no_finite_scale_is_not_finite) {
  const float most = std::numeric_limits<float>::max();
  const std::size_t count = kBlock;
  State s = coded_state(DType::float32, count, std::vector<float>(count));
  std::vector<float> m(count, 1.0f), v(count, 1.0f);
  m[1] = -0.93f * most, m[2] = -most, v[3] = most;
  adam_encode_state(s.shard(nullptr, DType::float32), m.data(), v.data());
  const Averages out = averages_of(s);
  EXPECT_NEAR(out.m[1], m[1], 0.04f * most);
  EXPECT_TRUE(std::isnan(out.m[2]) && std::isnan(out.v[2]) && std::isnan(out.m[3]) && std::isnan(out.v[3]));
  EXPECT_TRUE(out.m[0] == 0.0f && out.v[0] > 0.9f && out.v[0] < 1.1f);
}

TEST(coded_state, zeros_stay_zero) {
  const std::size_t count = 2 * kBlock;
  State s = coded_state(DType::float32, count, std::vector<float>(count, 1.0f));
  std::vector<float> grad(count);
  for (std::size_t i = 0; i < kBlock; i += 2) grad[i] = 1e-3f;
  for (int t = 1; t <= 3; ++t) adam_step(s.shard(grad.data(), DType::float32), {.lr = 0.1, .step = t});
  const Averages out = averages_of(s);
  for (std::size_t i = 0; i < count; ++i)
    if (grad[i] == 0) EXPECT_TRUE(out.m[i] == 0 && out.v[i] == 0 && s.weight[i] == 1.0f);
}

TEST(coded_state, a_learning_rate_of_nearly_zero_leaves_weights_and_averages_go_on) {
  const std::size_t count = kBlock + 3;
  for (const auto& [state, lr] :
       {std::pair{DType::bfloat16, 0.0}, {DType::uint8, 0.0}, {DType::bfloat16, 1e-38}, {DType::uint8, 1e-38}}) {
    State s = make_state(DType::float32, count, std::vector<float>(count, 1.5f), 2, state);
    std::vector<float> grad(count, 0.25f);
    for (std::size_t i = 0; i < count; i += 3) grad[i] = 0.0f;  // m = v = 0
    for (int t = 1; t <= 3; ++t)
      adam_step(s.shard(grad.data(), DType::float32), {.lr = lr, .beta1 = 0.5, .beta2 = 0.5, .step = t});
    EXPECT_TRUE(s.weight == std::vector<float>(count, 1.5f));
    if (state != DType::uint8) continue;
    const Averages out = averages_of(s);
    for (std::size_t i = 0; i < count; ++i) EXPECT_NEAR(out.m[i], grad[i] * 0.875f, 0.02f);
  }
}

enum class Gradients { ordinary, wide, odd };  // wide: with zeros; odd: also nonfinite ones

/// Weight, codes and scales after two steps of `isa`; NaN as one number.
std::vector<std::uint32_t> after_steps(Isa isa, DType weight, DType grad_dtype, bool adamw, std::size_t count,
                                       Gradients kind) {
  const float strange[] = {kInfinity, kNan, 1e-40f, 0.0f, std::numeric_limits<float>::max()};
  auto start = random_floats(count, 1);
  auto grad = kind == Gradients::ordinary ? random_floats(count, 2) : wide_range(count, 2, 5.0f);
  const bool odd = kind == Gradients::odd;
  std::vector<std::uint8_t> m(count), v(count);
  std::vector<float> scales((count / kBlock + 1) * 2);
  std::vector<std::uint16_t> w16(count), g16(count);
  std::vector<std::int16_t> lo(count);
  const float first = count > 0 ? start[0] : 0.0f;
  const auto& table = optim::optim_table(isa);
  if (weight == DType::bfloat16) table.split(w16.data(), lo.data(), start.data(), count);
  const bool wide = grad_dtype == DType::float32;
  const void* given = wide ? static_cast<const void*>(grad.data()) : g16.data();
  optim::OptimPiece piece{start.data(), nullptr, {m.data(), v.data()}, given, grad_dtype, count, DType::uint8, 77};
  piece.scales = scales.data();
  if (weight == DType::bfloat16) piece.weight = w16.data(), piece.lo = lo.data();
  for (const std::uint64_t step : {1u, 2u, 3u}) {
    if (odd && step == 2)
      for (std::size_t i = 3; i < count; i += 97) grad[i] = strange[i / 97 % 5];
    if (!wide) device::cast(g16.data(), grad_dtype, grad.data(), DType::float32, count);
    optim::AdamFactors f{0.75f, 0.9997f, 0.1f, 0.1f, 0.95f, 0.05f, 4.47f, 1e-8f, 3e-2f, adamw, step};
    f.small = optim::small_adam_factors(f);
    table.adam(piece, f);
  }
  if (weight == DType::bfloat16) table.join(start.data(), w16.data(), lo.data(), count);
  if (count > 0) EXPECT_TRUE(std::isfinite(start[0]) && start[0] != first && v[0] != 0);
  std::vector<float> wide_m(count), wide_v(count);
  table.decode_state(wide_m.data(), wide_v.data(), piece);
  std::vector<std::uint32_t> out;
  const auto add = [&out](float x) { out.push_back(std::isnan(x) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(x)); };
  for (std::size_t i = 0; i < count; ++i)
    add(start[i]), add(wide_m[i]), add(wide_v[i]), out.push_back(m[i] << 8 | v[i]);
  for (const float scale : scales) add(scale);
  return out;
}

TEST(coded_state, every_isa_gives_equal_bits) {
  for (const Isa isa : {Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    if (isa > best_isa()) continue;
    for (const DType weight : kWeights)
      for (const bool adamw : {true, false})
        for (const DType grad : {DType::float32, DType::bfloat16, DType::float16})
          for (const Gradients kind : {Gradients::ordinary, Gradients::wide, Gradients::odd})
            for (std::size_t count = 0; count <= 1100; count += count < 40 || (count > 500 && count < 530) ? 1 : 29)
              if (after_steps(isa, weight, grad, adamw, count, kind) !=
                  after_steps(Isa::plain, weight, grad, adamw, count, kind))
                return test::fail(__FILE__, __LINE__, std::string(name_of(isa)) + " differs from plain");
  }
}

TEST(coded_state, refuses_what_it_cannot_do) {
  State s = coded_state(DType::float32, 1024, std::vector<float>(1000));
  const std::vector<float> grad(1000);
  OptimShard shard = s.shard(grad.data(), DType::float32);
  shard.begin = 100;
  EXPECT_THROW_WITH(adam_step(shard, {}), InvalidArgument, "[100, 1000) cuts a block of 256 elements");
  shard.begin = 0, shard.end = 300;
  EXPECT_THROW_WITH(adam_step(shard, {}), InvalidArgument, "[0, 300) cuts a block");
  shard.end = 1000, shard.tile_count = 500;
  EXPECT_THROW_WITH(adam_step(shard, {}), InvalidArgument, "tile_count 500 is not a multiple of 256");
  shard.tile_count = 1000;
  EXPECT_THROW_WITH(lion_step(shard, {}), InvalidArgument, "lion: state is uint8");
  EXPECT_THROW_WITH(adam_encode_state(shard, nullptr, nullptr), InvalidArgument, "m or v is null");
  shard.state_dtype = DType::float32;
  EXPECT_THROW_WITH(adam_encode_state(shard, grad.data(), grad.data()), InvalidArgument, "must be uint8");
  EXPECT_EQ(adam_state_nbytes(DType::float32, 512, DType::uint8), 1024u + 16u);
  EXPECT_EQ(adam_state_nbytes(DType::bfloat16, 513, DType::uint8), 4 * 513u + 24u);
}

}  // namespace
}  // namespace zcomm
