// Adam with bf16 state: stochastic rounding is unbiased and independent, its bits depend only on (step, index).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "device/kernels.hpp"
#include "optim/arithmetic/adam_factors.hpp"
#include "optim/optim_table.hpp"
#include "shard_state.hpp"
#include "test.hpp"
#include "zcomm/adam.hpp"
#include "zcomm/error.hpp"
#include "zcomm/sgd.hpp"

namespace zcomm {
namespace {

float widen(std::uint16_t x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }

/// Array `which` (0: m, 1: v) of a state in one tile.
std::vector<std::uint16_t> array_of(const State& s, std::size_t which) {
  std::vector<std::uint16_t> out(s.count);
  std::memcpy(out.data(), reinterpret_cast<const std::byte*>(s.storage.data()) + which * s.count * 2, s.count * 2);
  return out;
}

State rounded_state(DType weight, std::size_t tile_count, const std::vector<float>& master) {
  return make_state(weight, tile_count, master, 2, DType::bfloat16);
}

/// beta1 = 0.5 and grad 2m make m exactly the wanted f32 number after a step from zero.
State state_with_average(std::size_t count, float m, std::int64_t step) {
  State s = rounded_state(DType::float32, count, std::vector<float>(count));
  const std::vector<float> grad(count, 2 * m);
  adam_step(s.shard(grad.data(), DType::float32), {.beta1 = 0.5, .beta2 = 0.5, .step = step});
  return s;
}

TEST(rounded_state, rounds_up_as_often_as_it_should) {
  const std::size_t count = 1 << 18;
  for (const std::uint32_t low : {0x0000u, 0x0001u, 0x0100u, 0x4000u, 0x8000u, 0xc123u, 0xffffu})
    for (const std::uint32_t high : {0x3f80u, 0xbf81u, 0x0001u, 0x7effu}) {  // also negative, subnormal, large
      const State s = state_with_average(count, std::bit_cast<float>(high << 16 | low), 1);
      std::size_t up = 0, wrong = 0;
      for (const std::uint16_t m : array_of(s, 0)) {
        up += m == high + 1;
        wrong += m != high && m != high + 1;
      }
      EXPECT_EQ(wrong, 0u);
      const double p = low / 65536.0, n = static_cast<double>(count);
      EXPECT_NEAR(static_cast<double>(up), n * p, 5 * std::sqrt(n * p * (1 - p)) + 1e-9);
    }
}

/// Correlation of two vectors of bits.
double correlation(const std::vector<bool>& a, const std::vector<bool>& b) {
  double both = 0, sum_a = 0, sum_b = 0;
  const auto n = static_cast<double>(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) both += a[i] && b[i], sum_a += a[i], sum_b += b[i];
  return (both / n - sum_a / n * sum_b / n) / std::sqrt(sum_a / n * (1 - sum_a / n) * (sum_b / n) * (1 - sum_b / n));
}

TEST(rounded_state, chances_are_independent) {
  const std::size_t count = 1 << 18;
  const float middle = std::bit_cast<float>(0x3f808000u);
  std::vector<std::vector<bool>> draws;  // m and v of steps 1, 2, 3, and m of the neighbour
  for (const std::int64_t step : {1, 2, 3, 1000000}) {
    const State s = state_with_average(count, middle, step);
    for (const std::size_t which : {0u, 1u}) {
      const auto values = array_of(s, which);
      const std::uint16_t least = *std::min_element(values.begin(), values.end());
      std::vector<bool> up(count);
      for (std::size_t i = 0; i < count; ++i) up[i] = values[i] != least;
      draws.push_back(up);
    }
  }
  for (const std::size_t shift : {1u, 2u, 64u, 4096u}) {
    draws.push_back(draws[0]);
    std::rotate(draws.back().begin(), draws.back().begin() + static_cast<std::ptrdiff_t>(shift), draws.back().end());
  }
  const double five_sigma = 5 / std::sqrt(static_cast<double>(count));
  for (std::size_t a = 0; a < draws.size(); ++a)
    for (std::size_t b = 0; b < a; ++b) EXPECT_LT(std::abs(correlation(draws[a], draws[b])), five_sigma);
}

TEST(rounded_state, slow_averages_follow_f64_in_the_mean) {
  const std::size_t count = 4096;
  State s = rounded_state(DType::float32, count, std::vector<float>(count));
  AdamParams p{.lr = 0.0, .beta1 = 0.99, .beta2 = 0.999};
  double m = 0, v = 0;
  for (p.step = 1; p.step <= 1500; ++p.step) {
    const float g = p.step <= 500 ? 1.0f : 0.5f;  // each later change of v is below half a last bit of bf16
    const std::vector<float> grad(count, g);
    adam_step(s.shard(grad.data(), DType::float32), p);
    m = p.beta1 * m + (1 - p.beta1) * static_cast<double>(g);
    v = p.beta2 * v + (1 - p.beta2) * static_cast<double>(g * g);
  }
  for (const std::size_t which : {0u, 1u}) {
    double mean = 0;
    for (const std::uint16_t x : array_of(s, which)) mean += static_cast<double>(widen(x)) / static_cast<double>(count);
    EXPECT_NEAR(mean / (which == 0 ? m : v), 1.0, 1e-3);  // to nearest: off by more than 1e-1
  }
}

TEST(rounded_state, cuts_tiles_and_threads_do_not_change_bits) {
  const std::size_t count = 50001;
  const auto start = random_floats(count, 5);
  for (const std::uint64_t first : {std::uint64_t{0}, (std::uint64_t{1} << 32) - 2000, std::uint64_t{1} << 40})
    for (const DType weight : kWeights) {
      State whole = rounded_state(weight, 20000, start), cut = whole, threaded = whole;
      adam_in_cuts(whole, {0, count}, 1, first);
      adam_in_cuts(cut, {0, 1, 17, 1999, 19999, 20001, 40000, 40000, count}, 1, first);
      adam_in_cuts(threaded, {0, count}, 0, first);
      EXPECT_TRUE(whole == cut);
      EXPECT_TRUE(whole == threaded);
      State tiled = rounded_state(weight, 3333, start), other = rounded_state(weight, 20000, start);
      adam_in_cuts(tiled, {0, count}, 1, first);
      EXPECT_TRUE(master_of(tiled) == master_of(whole));
      adam_in_cuts(other, {0, count}, 1, first + 1);
      EXPECT_FALSE(other == whole);  // chance is of the index
    }
}

TEST(rounded_state, bf16_weight_has_the_master_of_the_f32_weight) {
  const auto start = random_floats(3000, 9);
  State full = rounded_state(DType::float32, 512, start), half = rounded_state(DType::bfloat16, 512, start);
  adam_in_cuts(full, {0, 3000}, 1);
  adam_in_cuts(half, {0, 3000}, 1);
  EXPECT_TRUE(master_of(half) == full.weight);
}

/// Weight and state after a step of `isa`; NaN as one number.
std::vector<std::uint32_t> after_step(Isa isa, DType weight, DType grad_dtype, bool adamw, std::size_t count,
                                      std::uint64_t index) {
  const float odd[] = {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 1e-40f, 0.0f,
                       std::numeric_limits<float>::max()};
  auto start = random_floats(count, 1), grad = random_floats(count, 2);
  std::vector<std::uint16_t> m(count), v(count), w16(count), g16(count);
  std::vector<std::int16_t> lo(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 7 == 3) grad[i] = odd[i / 7 % 5];
    m[i] = static_cast<std::uint16_t>(0x3d00 + i % 200);
    v[i] = i % 11 == 5 ? 0x7f80 : static_cast<std::uint16_t>(0x3c00 + i % 90);
  }
  const auto& table = optim::optim_table(isa);
  if (weight == DType::bfloat16) table.split(w16.data(), lo.data(), start.data(), count);
  optim::AdamFactors f{0.75f, 0.9997f, 0.1f, 0.1f, 0.95f, 0.05f, 0.223606f, 1e-8f, 3e-2f, adamw, 12345};
  f.small = optim::small_adam_factors(f);
  const void* given = grad.data();
  if (grad_dtype != DType::float32)
    device::cast(g16.data(), grad_dtype, grad.data(), DType::float32, count), given = g16.data();
  optim::OptimPiece piece{start.data(), nullptr, {m.data(), v.data()}, given,
                          grad_dtype,   count,   DType::bfloat16,      index};
  const float first = count > 0 ? start[0] : 0.0f;
  if (weight == DType::bfloat16) piece.weight = w16.data(), piece.lo = lo.data();
  table.adam(piece, f);
  if (weight == DType::bfloat16) table.join(start.data(), w16.data(), lo.data(), count);
  if (count > 0) EXPECT_TRUE(std::isfinite(start[0]) && start[0] != first);
  std::vector<std::uint32_t> out;
  const auto add = [&out](float x) { out.push_back(std::isnan(x) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(x)); };
  for (std::size_t i = 0; i < count; ++i) add(start[i]), add(widen(m[i])), add(widen(v[i]));
  return out;
}

TEST(rounded_state, every_isa_gives_equal_bits) {
  for (const Isa isa : {Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    if (isa > best_isa()) continue;
    for (const DType weight : kWeights)
      for (const bool adamw : {true, false})
        for (const DType grad : {DType::float32, DType::bfloat16, DType::float16})
          for (const std::uint64_t index : {std::uint64_t{5}, (std::uint64_t{1} << 32) - 30})
            for (std::size_t count = 0; count <= 1100; count += count < 70 ? 1 : 103)
              if (after_step(isa, weight, grad, adamw, count, index) !=
                  after_step(Isa::plain, weight, grad, adamw, count, index))
                return test::fail(__FILE__, __LINE__, std::string(name_of(isa)) + " differs from plain");
  }
}

TEST(rounded_state, bits_are_those_of_the_first_release) {
  const State s = state_with_average(8, std::bit_cast<float>(0x3f808000u), 7);
  const std::vector<std::uint16_t> expected = {0x3f81, 0x3f81, 0x3f80, 0x3f81, 0x3f80, 0x3f80, 0x3f80, 0x3f80};
  EXPECT_TRUE(array_of(s, 0) == expected);  // a checkpointed run has the same bits under a later version
}

TEST(rounded_state, refuses_what_it_cannot_do) {
  float weight[4] = {}, grad[4] = {}, storage[8] = {};
  OptimShard shard{weight, DType::float32, grad, DType::float32, reinterpret_cast<std::byte*>(storage), 4, 4, 0, 4};
  shard.state_dtype = DType::float16;
  EXPECT_THROW_WITH(adam_step(shard, {}), InvalidArgument, "adam: state is float16");
  shard.state_dtype = DType::bfloat16;
  EXPECT_THROW_WITH(sgd_step(shard, {}), InvalidArgument, "sgd: state is bfloat16");
  EXPECT_THROW_WITH(adam_state_nbytes(DType::float32, 1, DType::int8), InvalidArgument, "state is int8");
  EXPECT_EQ(adam_state_nbytes(DType::float32, 10, DType::bfloat16), 40u);
  EXPECT_EQ(adam_state_nbytes(DType::bfloat16, 10, DType::bfloat16), 60u);
}

}  // namespace
}  // namespace zcomm
