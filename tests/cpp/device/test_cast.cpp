// cast and copy: all 16-bit values, ties, subnormals, overflow and NaN, to the bit, on every ISA.
#include "base/error.hpp"
#include "device/cpu/kernels_table.hpp"
#include "device/kernels.hpp"
#include "device/reference.hpp"
#include "test.hpp"

namespace zcomm {
namespace {

using test::Half;

template <class To, class From>
std::vector<To> cast_on(Isa isa, DType to, DType from, const std::vector<From>& in) {
  std::vector<To> out(in.size());
  device::kernel_table(isa).cast(out.data(), to, in.data(), from, in.size());
  return out;
}

struct HalfType {
  DType dtype;
  Half format;
};
const HalfType kHalves[] = {{DType::bfloat16, test::kBf16}, {DType::float16, test::kF16}};

std::vector<std::uint16_t> all_halves() {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}

TEST(cast, widens_every_16_bit_value_and_returns) {
  const auto all = all_halves();
  for (const auto& half : kHalves)
    for (const Isa isa : test::isas()) {
      const auto wide = cast_on<float>(isa, DType::float32, half.dtype, all);
      const auto wider = cast_on<double>(isa, DType::float64, half.dtype, all);
      const auto back = cast_on<std::uint16_t>(isa, half.dtype, DType::float32, wide);
      const auto far_back = cast_on<std::uint16_t>(isa, half.dtype, DType::float64, wider);
      const std::uint16_t quiet_bit = half.dtype == DType::bfloat16 ? 0x40 : 0x200;
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        const double expected = test::decode(half.format, all[i]);
        const bool nan = std::isnan(expected);
        const bool same =
            std::bit_cast<std::uint64_t>(static_cast<double>(wide[i])) == std::bit_cast<std::uint64_t>(expected) &&
            std::bit_cast<std::uint64_t>(wider[i]) == std::bit_cast<std::uint64_t>(expected);
        wrong += nan ? !std::isnan(wide[i]) || !std::isnan(wider[i]) : !same;
        const std::uint16_t kept = static_cast<std::uint16_t>(nan ? all[i] | quiet_bit : all[i]);
        wrong += back[i] != kept || far_back[i] != kept;
      }
      EXPECT_EQ(wrong, 0u);
    }
}

/// Every 16-bit value, the tie above it, and the floats on either side of both; then all specials.
std::vector<float> tricky_floats(Half format) {
  std::vector<float> out;
  for (int bits = 0; bits < 0x7fff; ++bits) {
    const double low = test::decode(format, static_cast<std::uint16_t>(bits));
    const double high = test::decode(format, static_cast<std::uint16_t>(bits + 1));
    if (std::isnan(low) || std::isnan(high)) break;
    const float value = static_cast<float>(low);
    const float tie = std::isinf(high) ? std::ldexp(2.0f - std::ldexp(1.0f, -format.fraction - 1), format.bias)
                                       : static_cast<float>((low + high) / 2);
    for (const float x :
         {value, std::nextafter(value, INFINITY), tie, std::nextafter(tie, 0.0f), std::nextafter(tie, INFINITY)}) {
      out.push_back(x);
      out.push_back(-x);
    }
  }
  for (const std::uint32_t bits : {0x00000001u, 0x00007fffu, 0x00008000u, 0x00008001u, 0x007fffffu, 0x00800000u,
                                   0x7f7fffffu, 0x7f800000u, 0x33000000u, 0x33000001u})
    for (const std::uint32_t sign : {0u, 0x80000000u}) out.push_back(std::bit_cast<float>(bits | sign));
  return out;
}

TEST(cast, narrows_ties_and_subnormals_to_nearest_even) {
  for (const auto& half : kHalves) {
    const auto in = tricky_floats(half.format);
    std::vector<double> in64(in.begin(), in.end());
    for (const Isa isa : test::isas()) {
      const auto out = cast_on<std::uint16_t>(isa, half.dtype, DType::float32, in);
      const auto out64 = cast_on<std::uint16_t>(isa, half.dtype, DType::float64, in64);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < in.size(); ++i) {
        const auto expected = test::encode(half.format, static_cast<double>(in[i]));
        wrong += out[i] != expected || out64[i] != expected;
      }
      EXPECT_EQ(wrong, 0u);
    }
  }
}

TEST(cast, narrows_random_bits) {
  std::mt19937_64 random(7);
  std::vector<float> in(100003);
  for (float& x : in) x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  for (const auto& half : kHalves) {
    const auto first = cast_on<std::uint16_t>(Isa::plain, half.dtype, DType::float32, in);
    for (const Isa isa : test::isas()) {
      const auto out = cast_on<std::uint16_t>(isa, half.dtype, DType::float32, in);
      EXPECT_TRUE(out == first);  // NaN payloads too
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < in.size(); ++i)
        wrong += std::isnan(in[i]) ? !test::is_nan(half.format, out[i])
                                   : out[i] != test::encode(half.format, static_cast<double>(in[i]));
      EXPECT_EQ(wrong, 0u);
    }
  }
}

TEST(cast, f64_rounds_once) {
  // Just above a tie of the 16-bit format, by less than f32 can see: rounding through f32 would go down to even.
  for (const auto& half : kHalves) {
    std::vector<double> in;
    for (int k = 0; k < 300; ++k) {
      const double tie = 1.0 + std::ldexp(2.0 * k + 1.0, -half.format.fraction - 1);
      for (const double x : {tie, tie * (1 + 1e-15), tie * (1 - 1e-15), tie * 1e-5, -tie}) in.push_back(x);
    }
    for (const double x : {1e300, -1e300, 1e-300, 5e-324, 65519.999999999, 65520.0, 3.3961775292304957e38})
      in.push_back(x);
    for (const Isa isa : test::isas()) {
      const auto out = cast_on<std::uint16_t>(isa, half.dtype, DType::float64, in);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < in.size(); ++i) wrong += out[i] != test::encode(half.format, in[i]);
      EXPECT_EQ(wrong, 0u);
    }
  }
}

TEST(cast, bf16_to_f16_rounds_once) {
  const auto all = all_halves();
  for (const Isa isa : test::isas())
    for (const auto& from : kHalves)
      for (const auto& to : kHalves) {
        if (from.dtype == to.dtype) continue;
        const auto out = cast_on<std::uint16_t>(isa, to.dtype, from.dtype, all);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < all.size(); ++i) {
          const double x = test::decode(from.format, all[i]);
          wrong += std::isnan(x) ? !test::is_nan(to.format, out[i]) : out[i] != test::encode(to.format, x);
        }
        EXPECT_EQ(wrong, 0u);
      }
}

TEST(cast, tails_equal_the_vector_body) {
  std::mt19937_64 random(11);
  std::vector<float> in(71);
  for (float& x : in)
    x = std::bit_cast<float>(static_cast<std::uint32_t>(random() % 3 ? random() : random() & 0x807fffff));
  for (const auto& half : kHalves)
    for (const Isa isa : test::isas())
      for (std::size_t count = 0; count <= 70; ++count) {
        std::vector<std::uint16_t> out(count + 1, 0xabcd), expected(count);
        device::kernel_table(isa).cast(out.data(), half.dtype, in.data() + 1, DType::float32, count);
        for (std::size_t i = 0; i < count; ++i)
          device::kernel_table(Isa::plain).cast(&expected[i], half.dtype, &in[i + 1], DType::float32, 1);
        EXPECT_EQ(out[count], 0xabcd);
        out.pop_back();
        EXPECT_TRUE(out == expected);
      }
}

TEST(cast, checks_its_arguments) {
  float x = 1.5f;
  double y = 0;
  EXPECT_THROW_WITH(device::cast(&x, DType::int32, &x, DType::float32, 1), InvalidArgument, "to int32");
  EXPECT_THROW_WITH(device::cast(nullptr, DType::float32, &y, DType::float64, 1), InvalidArgument, "dst is null");
  device::cast(nullptr, DType::float32, nullptr, DType::float64, 0);
  device::cast(&y, DType::float64, &x, DType::float32, 1);
  EXPECT_EQ(y, 1.5);
}

TEST(copy, any_offset_and_size) {
  std::vector<unsigned char> in(5000), out(5000);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i * 7 + 1);
  for (const Isa isa : test::isas())
    for (const std::size_t nbytes : {0u, 1u, 31u, 63u, 64u, 65u, 127u, 200u, 4096u, 4500u})
      for (const std::size_t offset : {0u, 1u, 17u, 63u}) {
        std::fill(out.begin(), out.end(), 0);
        device::kernel_table(isa).stream(out.data() + offset, in.data() + 3, nbytes);
        EXPECT_TRUE(std::equal(in.begin() + 3, in.begin() + 3 + static_cast<std::ptrdiff_t>(nbytes),
                               out.begin() + static_cast<std::ptrdiff_t>(offset)));
        std::size_t touched = 0;
        for (std::size_t i = 0; i < out.size(); ++i) touched += (i < offset || i >= offset + nbytes) && out[i] != 0;
        EXPECT_EQ(touched, 0u);
      }
}

TEST(copy, large) {
  std::vector<unsigned char> in(9 << 20), out(in.size());
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i ^ (i >> 8));
  device::copy(out.data() + 1, in.data(), in.size() - 1);
  EXPECT_TRUE(std::equal(in.begin(), in.end() - 1, out.begin() + 1));
  EXPECT_THROW_WITH(device::copy(nullptr, in.data(), 8), InvalidArgument, "dst is null");
}

}  // namespace
}  // namespace zcomm
