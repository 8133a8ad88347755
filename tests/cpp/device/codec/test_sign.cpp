// sign: the part's scale, signs, masks, the identity of error feedback.
#include "device/codec/cases.hpp"

namespace zcomm {
namespace {

using test::kSign;
using test::Room;

struct Signs {
  explicit Signs(const std::vector<float>& in, const std::uint8_t* mask = nullptr)
      : Signs(in, std::vector<float>(in.size()), mask) {}
  Signs(const std::vector<float>& in, std::vector<float> before, const std::uint8_t* mask = nullptr)
      : out(encoded_nbytes(kSign, in.size())), error(std::move(before)) {
    device::encode(kSign, {.out = out.data(),
                           .in = in.data(),
                           .dtype = DType::float32,
                           .count = in.size(),
                           .error = error.data(),
                           .mask = mask});
    decoded = test::decoded(kSign, out.data(), in.size(), mask);
    scale = test::scale_of(out.data(), 0);
  }
  Room out;
  std::vector<float> error, decoded;
  float scale = 0;
};

/// Magnitudes from far below to far above their root mean square.
std::vector<float> spread_numbers(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const int exponent = static_cast<int>(random() % 200) - 100;
  std::vector<float> all(count);
  for (float& x : all) {
    const float magnitude = std::ldexp(1.0f + static_cast<float>(random() >> 41) * 0x1p-23f,
                                       exponent - static_cast<int>(random() % 30) + (random() % 200 == 0 ? 5 : 0));
    x = random() % 20 == 0 ? 0.0f : random() % 2 == 0 ? magnitude : -magnitude;
  }
  return all;
}

TEST(sign, the_scale_is_the_root_mean_square) {
  for (const std::size_t count : test::awkward_counts()) {
    const auto in = spread_numbers(count, count);
    double squares = 0;
    for (const float x : in) squares += static_cast<double>(x) * static_cast<double>(x);
    const double root = std::sqrt(squares / static_cast<double>(count));
    const Signs signs(in);
    EXPECT_NEAR(static_cast<double>(signs.scale), root, root * 0x1p-8);
    for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(signs.decoded[i], in[i] < 0 ? -signs.scale : signs.scale);
  }
}

TEST(sign, decoded_plus_error_is_the_input_within_a_last_bit_of_the_scale) {
  for (std::uint64_t turn = 0; turn < (test::few_values() ? 5 : 100); ++turn)
    for (const std::size_t count : {1u, 33u, 257u, 5000u}) {
      const auto in = spread_numbers(count, turn + count), before = spread_numbers(count, turn + count + 1000);
      const Signs signs(in, before);
      std::size_t beyond = 0, inexact = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const auto h = static_cast<double>(in[i] + before[i]), s = static_cast<double>(signs.scale);
        const double off = std::fabs(static_cast<double>(signs.decoded[i]) + static_cast<double>(signs.error[i]) - h);
        beyond += off > s * 0x1p-24;
        inexact += off != 0 && std::fabs(h) >= s / 2;
      }
      EXPECT_EQ(beyond, 0u);
      EXPECT_EQ(inexact, 0u);
    }
}

TEST(sign, zeros_are_positive_and_a_part_of_zeros_is_zero) {
  const Signs zeros(std::vector<float>(300, -0.0f));
  EXPECT_EQ(zeros.scale, 0.0f);
  for (const float x : zeros.decoded) EXPECT_EQ(std::bit_cast<std::uint32_t>(x), 0u);
  std::vector<float> in(300, -0.0f);
  in[5] = -3.0f;
  const Signs signs(in);
  for (std::size_t i = 0; i < in.size(); ++i) EXPECT_EQ(signs.decoded[i] < 0, i == 5);
}

TEST(sign, masked_elements_decode_to_zero_and_have_no_part_in_the_scale) {
  for (const std::size_t count : test::awkward_counts()) {
    std::mt19937_64 random(count);
    std::vector<std::uint8_t> mask((count + 7) / 8);
    for (std::uint8_t& byte : mask) byte = static_cast<std::uint8_t>(random());
    std::vector<float> in(count), kept;
    for (std::size_t i = 0; i < count; ++i) {
      const bool keeps = (mask[i / 8] >> i % 8 & 1) != 0;
      in[i] = (random() % 2 == 0 ? 1.0f : -1.0f) * (keeps ? 2.0f : 1e20f);
    }
    const Signs signs(in, mask.data());
    for (std::size_t i = 0; i < count; ++i) {
      const bool keeps = (mask[i / 8] >> i % 8 & 1) != 0;
      EXPECT_EQ(signs.decoded[i], keeps ? in[i] : 0.0f);
      EXPECT_EQ(signs.error[i], 0.0f);
    }
  }
}

TEST(sign, a_part_that_is_not_finite_decodes_to_nan_and_forgets_its_error) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> in(700, 1.0f);
    in[699] = bad;
    const Signs signs(in, std::vector<float>(in.size(), 0.5f));
    for (std::size_t i = 0; i < in.size(); ++i) {
      EXPECT_TRUE(std::isnan(signs.decoded[i]));
      EXPECT_EQ(signs.error[i], 0.0f);
    }
    std::vector<std::uint8_t> mask(88, 255);
    mask[699 / 8] = static_cast<std::uint8_t>(~(1 << 699 % 8));
    EXPECT_EQ(Signs(in, mask.data()).scale, 1.0f);  // a masked element does not count
  }
  const Signs large(std::vector<float>(300, std::numeric_limits<float>::max()));  // no bf16 number is so large
  EXPECT_TRUE(std::isnan(large.decoded[0]));
}

}  // namespace
}  // namespace zcomm
