// ExactSum: exact, the same in any order and partition, over transferred words; block squares equal on every ISA.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "device/kernels.hpp"
#include "flush.hpp"
#include "optim/optim_table.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"
#include "zcomm/exact_sum.hpp"

namespace zcomm {
namespace {

double sum_of(const std::vector<double>& terms) {
  ExactSum sum;
  for (const double x : terms) sum.add(x);
  return sum.value();
}

bool same_bits(double a, double b) { return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b); }

TEST(exact_sum, cases_with_known_answers) {
  const double tiny = std::numeric_limits<double>::denorm_min(), huge = std::numeric_limits<double>::max();
  EXPECT_TRUE(same_bits(sum_of({}), 0.0));
  EXPECT_EQ(sum_of({tiny}), tiny);
  EXPECT_EQ(sum_of({tiny, tiny, tiny}), 3 * tiny);
  EXPECT_EQ(sum_of({huge}), huge);
  EXPECT_EQ(sum_of({-huge, tiny, huge}), tiny);
  EXPECT_EQ(sum_of({1e300, 1.0, -1e300}), 1.0);
  EXPECT_EQ(sum_of({1.0, tiny, -1.0}), tiny);
  EXPECT_EQ(sum_of({-0.25, -0.5}), -0.75);
  EXPECT_EQ(sum_of({0.1, -0.1}), 0.0);
  EXPECT_TRUE(std::isinf(sum_of({huge, huge})));
  EXPECT_EQ(sum_of({huge, huge, -huge}), huge);  // no overflow on the way
}

TEST(exact_sum, rounds_to_nearest_even_once) {
  const double ulp = std::ldexp(1.0, -52), half = ulp / 2, tiny = std::numeric_limits<double>::denorm_min();
  EXPECT_EQ(sum_of({1.0, half}), 1.0);
  EXPECT_EQ(sum_of({1.0, half, tiny}), 1.0 + ulp);
  EXPECT_EQ(sum_of({1.0, half, -tiny}), 1.0);
  EXPECT_EQ(sum_of({1.0 + ulp, half}), 1.0 + 2 * ulp);
  EXPECT_EQ(sum_of({1.0 + ulp, half, -tiny}), 1.0 + ulp);
  EXPECT_EQ(sum_of({-1.0, -half, -tiny}), -1.0 - ulp);
  for (int e = -1000; e < 1000; e += 7) {  // every alignment of digits
    const double one = std::ldexp(1.0, e), step = std::ldexp(1.0, e - 53);
    EXPECT_EQ(sum_of({one, step}), one);
    EXPECT_EQ(sum_of({one, step, tiny}), one + 2 * step);
    EXPECT_EQ(sum_of({one, 2 * step, step}), one + 4 * step);
  }
}

TEST(exact_sum, every_double_alone_is_itself) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 20000; ++i) {
    const double x = std::bit_cast<double>(random());
    if (!std::isfinite(x)) continue;
    EXPECT_EQ(sum_of({x}), x);
    EXPECT_EQ(sum_of({x, x}), 2 * x);
  }
}

__extension__ using Int128 = __int128;

/// Terms with a sum that fits in 128-bit integers of 2^-60: an independent exact reference.
TEST(exact_sum, equals_integer_arithmetic) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> terms(100);
    Int128 total = 0;
    for (double& x : terms) {
      const auto units = static_cast<std::int64_t>(random()) >> (11 + random() % 50);
      const int up = static_cast<int>(random() % 40);
      x = std::ldexp(static_cast<double>(units), up - 60);
      total += static_cast<Int128>(units) << up;
    }
    EXPECT_EQ(sum_of(terms), std::ldexp(static_cast<double>(total), -60));
  }
}

TEST(exact_sum, counts_non_finite_terms) {
  EXPECT_TRUE(std::isnan(sum_of({1.0, std::numeric_limits<double>::infinity()})));
  EXPECT_TRUE(std::isnan(sum_of({std::numeric_limits<double>::quiet_NaN()})));
  ExactSum sum;
  sum.add(std::nan(""));
  EXPECT_EQ(sum.words()[ExactSum::kWords - 1], 1);
  sum.clear();
  EXPECT_EQ(sum.value(), 0.0);
}

TEST(exact_sum, order_and_partition_do_not_matter) {
  std::mt19937_64 random(6);
  std::vector<double> terms(5000);
  for (double& x : terms) x = std::ldexp(static_cast<double>(random() >> 11), static_cast<int>(random() % 600) - 300);
  const double expected = sum_of(terms);
  for (int round = 0; round < 20; ++round) {
    std::shuffle(terms.begin(), terms.end(), random);
    const std::size_t ranks = 1 + random() % 1024;
    ExactSum total;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      ExactSum part;
      for (std::size_t i = terms.size() * rank / ranks; i < terms.size() * (rank + 1) / ranks; ++i) part.add(terms[i]);
      part.normalize();
      for (std::size_t w = 0; w < ExactSum::kWords; ++w) total.words()[w] += part.words()[w];
    }
    EXPECT_TRUE(same_bits(total.value(), expected));
    total.normalize();
    EXPECT_TRUE(same_bits(total.value(), expected));
  }
}

TEST(exact_sum, words_of_2_to_the_20_ranks_do_not_overflow) {
  ExactSum part, total;
  part.add(std::ldexp(1.0 - std::ldexp(1.0, -53), 40));
  part.add(-std::ldexp(1.0, -1000));
  part.normalize();
  for (std::size_t w = 0; w < ExactSum::kWords; ++w) total.words()[w] = part.words()[w] << 20;
  EXPECT_TRUE(same_bits(total.value(), std::ldexp(part.value(), 20)));
}

std::vector<float> wide_floats(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(count);
  for (float& x : out) x = std::ldexp(normal(random), static_cast<int>(random() % 20) - 10);
  return out;
}

/// As documented at add_squares, element by element.
double documented_block(const std::vector<double>& g) {
  double lane[16] = {};
  for (std::size_t i = 0; i < 64; ++i) lane[i % 16] += g[i] * g[i];
  for (std::size_t width : {8u, 4u, 2u, 1u})
    for (std::size_t j = 0; j < width; ++j) lane[j] += lane[j + width];
  return lane[0];
}

TEST(add_squares, blocks_are_summed_as_documented_on_every_isa) {
  const std::size_t blocks = 37;
  const auto wide = wide_floats(blocks * 64, 1);
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    std::vector<std::byte> grad(wide.size() * 4);
    device::cast(grad.data(), dtype, wide.data(), DType::float32, wide.size());
    std::vector<double> exact(wide.size());
    device::cast(exact.data(), DType::float64, grad.data(), dtype, wide.size());
    for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
      if (isa > best_isa()) continue;
      std::vector<double> sums(blocks);
      optim::optim_table(isa).squares(sums.data(), grad.data(), dtype, blocks);
      for (std::size_t b = 0; b < blocks; ++b) {
        const auto first = exact.begin() + static_cast<std::ptrdiff_t>(b * 64);
        EXPECT_TRUE(same_bits(sums[b], documented_block({first, first + 64})));
      }
    }
  }
}

TEST(add_squares, shards_at_block_bounds_give_equal_bits) {
  const auto grad = wide_floats(64 * 500 + 17, 2);
  ExactSum whole;
  add_squares(whole, grad.data(), DType::float32, grad.size());
  long double expected = 0;
  for (const float g : grad) expected += static_cast<long double>(g) * static_cast<long double>(g);
  EXPECT_NEAR(whole.value() / static_cast<double>(expected), 1.0, 1e-15);
  for (const std::size_t world_size : {2u, 3u, 7u, 64u}) {
    ExactSum total;
    for (std::size_t rank = 0; rank < world_size; ++rank) {
      const std::size_t begin = 500 * rank / world_size * 64;
      const std::size_t end = rank + 1 == world_size ? grad.size() : 500 * (rank + 1) / world_size * 64;
      ExactSum part;
      add_squares(part, grad.data() + begin, DType::float32, end - begin);
      part.normalize();
      for (std::size_t w = 0; w < ExactSum::kWords; ++w) total.words()[w] += part.words()[w];
    }
    EXPECT_TRUE(same_bits(total.value(), whole.value()));
  }
}

TEST(add_squares, threads_change_nothing) {
  const auto grad = wide_floats((1 << 20) + 37, 5);
  ExactSum alone, together;
  constexpr std::size_t part = 64 * kNormBlock;
  for (std::size_t i = 0; i < grad.size(); i += part)
    add_squares(alone, grad.data() + i, DType::float32, std::min(part, grad.size() - i));
  add_squares(together, grad.data(), DType::float32, grad.size());
  alone.normalize(), together.normalize();
  EXPECT_TRUE(std::ranges::equal(alone.words(), together.words()));
}

TEST(add_squares, subnormals_count_whatever_the_caller_does_with_them) {
  const std::vector<float> tiny(130, 1e-40f);
  ExactSum kept, sum;
  add_squares(kept, tiny.data(), DType::float32, tiny.size());
  EXPECT_TRUE(kept.value() > 0);
  const test::FlushSubnormals flush;
  add_squares(sum, tiny.data(), DType::float32, tiny.size());
  EXPECT_EQ(sum.value(), kept.value());
}

TEST(add_squares, edges) {
  std::vector<float> grad(130, 3e38f);
  ExactSum sum;
  add_squares(sum, grad.data(), DType::float32, grad.size());  // squares beyond f32 are fine
  EXPECT_NEAR(sum.value() / (130 * 9e76), 1.0, 1e-6);
  grad[129] = std::numeric_limits<float>::infinity();
  add_squares(sum, grad.data(), DType::float32, grad.size());
  EXPECT_TRUE(std::isnan(sum.value()));
  ExactSum none;
  add_squares(none, nullptr, DType::float32, 0);
  EXPECT_EQ(none.value(), 0.0);
  EXPECT_THROW_WITH(add_squares(none, grad.data(), DType::int32, 1), InvalidArgument, "int32");
  EXPECT_THROW_WITH(add_squares(none, nullptr, DType::float32, 5), InvalidArgument, "count 5");
}

}  // namespace
}  // namespace zcomm
