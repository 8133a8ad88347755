// block_int and fp8_e4m3: codes by definition, exact residues, bounds, error feedback, differences, rotation, chance.
#include <algorithm>

#include "device/codec/cases.hpp"
#include "flush.hpp"

namespace zcomm {
namespace {

using test::kFp8;
using test::kInt4;
using test::kInt8;
using test::Room;

const Codec kBlockCodecs[] = {kInt8, kInt4, kFp8};

/// The value of the code nearest to a quotient, of two the even code.
double nearest_value(const Codec& codec, double quotient) {
  if (codec.kind == CodecKind::block_int) return std::nearbyint(quotient);
  const double magnitude = std::fabs(quotient);
  int code = 0;
  while (code < 126 && test::e4m3(code + 1) <= magnitude) ++code;
  if (code < 126) {
    const double below = magnitude - test::e4m3(code), above = test::e4m3(code + 1) - magnitude;
    if (above < below || (above == below && code % 2 == 1)) ++code;
  }
  return std::copysign(test::e4m3(code), quotient);
}

struct Encoded {
  Encoded(const Codec& codec, const std::vector<float>& in) : out(encoded_nbytes(codec, in.size())), error(in.size()) {
    device::encode(
        codec,
        {.out = out.data(), .in = in.data(), .dtype = DType::float32, .count = in.size(), .error = error.data()});
    decoded = test::decoded(codec, out.data(), in.size());
  }
  Room out;
  std::vector<float> error, decoded;
};

TEST(block_codecs, codes_are_those_of_the_definition) {
  for (const Codec& codec : kBlockCodecs)
    for (const std::size_t count : {1u, 130u, 256u, 700u, 20000u}) {
      const float top = test::top_of(codec);
      const auto in = test::hard_numbers(count, top, count);
      const Encoded encoded(codec, in);
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t begin = i / kCodecBlock * kCodecBlock;
        const float largest = test::largest_of(&in[begin], std::min(kCodecBlock, count - begin));
        const float scale = test::up_to_bf16(std::max(largest / top, 0x1p-118f));
        EXPECT_EQ(test::scale_of(encoded.out.data(), i / kCodecBlock), scale);
        const double value = nearest_value(codec, static_cast<double>(in[i] / scale)) * static_cast<double>(scale);
        if (static_cast<double>(encoded.decoded[i]) != value)
          return test::fail(__FILE__, __LINE__,
                            text(test::show(codec), ": element ", i, " of ", count, ": ", test::show(in[i]), " is ",
                                 test::show(encoded.decoded[i]), ", not ", test::show(value)));
      }
    }
}

TEST(block_codecs, decoded_plus_error_is_the_input_to_the_bit) {
  const std::size_t turns = test::few_values() ? 2 : 40;
  for (const Codec& codec : kBlockCodecs)
    for (std::size_t turn = 0; turn < turns; ++turn)
      for (const std::size_t count : {7u, 257u, 12000u}) {
        const auto in = test::hard_numbers(count, test::top_of(codec), 1000 * turn + count);
        Encoded encoded(codec, in);
        std::size_t wrong = 0, out_of_bounds = 0;
        for (std::size_t i = 0; i < count; ++i) {
          const std::size_t begin = i / kCodecBlock * kCodecBlock;
          const float largest = test::largest_of(&in[begin], std::min(kCodecBlock, count - begin));
          wrong += encoded.decoded[i] + encoded.error[i] != in[i];
          if (codec.kind == CodecKind::block_int && largest >= 0x1p-110f)  // below, the least scale counts
            out_of_bounds += std::fabs(static_cast<double>(encoded.error[i])) >
                             static_cast<double>(largest) * test::block_int_bound(codec.bits);
        }
        EXPECT_EQ(wrong, 0u);
        EXPECT_EQ(out_of_bounds, 0u);
      }
}

TEST(block_codecs, the_next_part_has_the_error_of_the_last) {
  for (const Codec& codec : kBlockCodecs)
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      const std::size_t count = 1000;
      std::vector<float> error(count);
      for (std::uint64_t step = 0; step < 5; ++step) {
        std::mt19937_64 random(step);
        std::vector<std::byte> in(count * size_of(dtype));
        for (std::size_t i = 0; i < count; ++i)
          test::put_real(dtype, in.data(), i, static_cast<double>(random() >> 40) * 0x1p-20 - 8.0);
        const auto before = error;
        Room out(encoded_nbytes(codec, count));
        device::encode(codec, {out.data(), in.data(), dtype, count, error.data()});
        const auto decoded = test::decoded(codec, out.data(), count);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < count; ++i) {
          const float h = static_cast<float>(test::get_real(dtype, in.data(), i)) + before[i];
          wrong += decoded[i] + error[i] != h;
        }
        EXPECT_EQ(wrong, 0u);
      }
    }
}

TEST(block_codecs, keep_averages_the_error) {
  const std::size_t count = 600;
  const auto in = test::hard_numbers(count, 127.0f, 5);
  std::vector<float> error(count), before(count);
  for (std::size_t i = 0; i < count; ++i) before[i] = error[i] = in[i] * 1e-3f;
  Room out(encoded_nbytes(kInt8, count));
  device::encode(kInt8, {.out = out.data(),
                         .in = in.data(),
                         .dtype = DType::float32,
                         .count = count,
                         .error = error.data(),
                         .keep = 0.8f});
  const auto decoded = test::decoded(kInt8, out.data(), count);
  for (std::size_t i = 0; i < count; ++i)
    EXPECT_EQ(error[i], 0.8f * before[i] + (1.0f - 0.8f) * ((in[i] + before[i]) - decoded[i]));
}

/// A constant input, whatever the type of the error: the sum of T decoded parts is T times the input, but for one
/// residue.
TEST(block_codecs, errors_of_every_type_arrive_in_the_long_run) {
  const std::size_t count = 300;
  const int steps = 100;
  for (const Codec& codec : kBlockCodecs)
    for (const DType error_dtype : {DType::float32, DType::bfloat16, DType::int8}) {
      std::vector<float> in(count);
      for (std::size_t i = 0; i < count; ++i) in[i] = i == 0 ? 100.0f : std::sin(static_cast<float>(i));
      Room error(error_dtype == DType::int8 ? encoded_nbytes(kInt8, count) : count * size_of(error_dtype));
      Room out(encoded_nbytes(codec, count));
      error.zero();
      std::vector<double> sum(count), first(count);
      for (int step = 0; step < steps; ++step) {
        device::encode(codec, {.out = out.data(),
                               .in = in.data(),
                               .dtype = DType::float32,
                               .count = count,
                               .error = error.data(),
                               .error_dtype = error_dtype});
        const auto decoded = test::decoded(codec, out.data(), count);
        for (std::size_t i = 0; i < count; ++i) sum[i] += static_cast<double>(decoded[i]);
        if (step == 0) first = sum;
      }
      EXPECT_TRUE(error.guarded());
      double worst = 0, alone = 0;
      for (std::size_t i = 0; i < 256; ++i) {
        const auto x = static_cast<double>(in[i]);
        worst = std::max(worst, std::fabs(sum[i] / steps - x));
        alone = std::max(alone, std::fabs(first[i] - x));
      }
      EXPECT_LE(worst, alone * 0.2);
    }
}

TEST(block_codecs, a_block_that_is_not_finite_decodes_to_nan_and_forgets_its_error) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const Codec& base : kBlockCodecs)
    for (const int rotate : {0, 32})
      for (const float bad : {infinity, -infinity, nan, -3.4e38f, 0x1.ep+127f}) {
        Codec codec = base;
        codec.rotate = rotate;
        std::vector<float> in(3 * kCodecBlock, 1.5f), error(in.size(), 0.25f);
        in[300] = bad;
        Room out(encoded_nbytes(codec, in.size()));
        device::encode(codec, {out.data(), in.data(), DType::float32, in.size(), error.data()});
        const auto decoded = test::decoded(codec, out.data(), in.size());
        for (std::size_t i = 0; i < in.size(); ++i) {
          const bool lost = i / kCodecBlock == 1;
          EXPECT_EQ(std::isnan(decoded[i]), lost);
          if (lost) EXPECT_EQ(error[i], 0.0f);
        }
      }
}

TEST(block_codecs, the_largest_finite_numbers_stay_finite) {
  for (const Codec& codec : kBlockCodecs) {
    std::vector<float> in(kCodecBlock);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = std::nextafter(0x1.ep+127f, 0.0f) * (i % 2 == 0 ? 1 : -0.7f);
    const Encoded encoded(codec, in);
    for (std::size_t i = 0; i < in.size(); ++i) {
      EXPECT_TRUE(std::isfinite(encoded.decoded[i]));
      EXPECT_EQ(encoded.decoded[i] + encoded.error[i], in[i]);
    }
  }
}

TEST(block_codecs, differences_leave_the_same_base_on_both_sides) {
  for (const Codec& kind : kBlockCodecs)
    for (const int rotate : {0, 32})
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
        Codec codec = kind;
        codec.rotate = rotate;
        const std::size_t count = 777;
        std::mt19937_64 random(1);
        std::vector<float> weight(count);
        for (float& w : weight) w = static_cast<float>(random() >> 40) * 0x1p-24f - 0.5f;
        Room sender(count * size_of(dtype)), receiver(count * size_of(dtype));
        sender.zero(), receiver.zero();
        for (int step = 0; step < 6; ++step) {
          Room out(encoded_nbytes(codec, count));
          device::encode(codec, {.out = out.data(),
                                 .in = weight.data(),
                                 .dtype = DType::float32,
                                 .count = count,
                                 .base = sender.data(),
                                 .base_dtype = dtype});
          const std::byte* in = out.data();
          device::decode_sum(
              codec, {.out = receiver.data(), .in = {&in, 1}, .count = count, .dtype = dtype, .accumulate = true});
          EXPECT_EQ(std::memcmp(sender.data(), receiver.data(), sender.nbytes()), 0);
        }
        double worst = 0;  // of the same weight: differences shrink to the last bits of the base
        for (std::size_t i = 0; i < count; ++i)
          worst =
              std::max(worst, std::fabs(test::get_real(dtype, receiver.data(), i) - static_cast<double>(weight[i])));
        EXPECT_LE(worst, dtype == DType::bfloat16 ? 0x1p-9 : 0x1p-12);
      }
}

TEST(block_codecs, rotation_spreads_large_elements) {
  const std::size_t count = 2048 + 40;  // the last 8 elements are a turn of their own
  for (const Codec& plain : kBlockCodecs) {
    Codec turned = plain;
    turned.rotate = 32;
    std::mt19937_64 random(9);
    std::vector<float> in(count);
    for (std::size_t i = 0; i < count; ++i)
      in[i] = (static_cast<float>(random() >> 40) * 0x1p-24f - 0.5f) * (i % 256 == 17 ? 60.0f : 1.0f);
    const Encoded a(plain, in), b(turned, in);
    double squares_a = 0, squares_b = 0, rounding = 0;
    for (std::size_t i = 0; i < count; ++i) {
      squares_a += std::pow(static_cast<double>(a.error[i]), 2);
      squares_b += std::pow(static_cast<double>(b.error[i]), 2);
      rounding = std::max(rounding, std::fabs(static_cast<double>(b.decoded[i] + b.error[i] - in[i])));
    }
    if (plain.kind == CodecKind::block_int) EXPECT_LT(squares_b, squares_a * 0.5);
    EXPECT_LE(rounding, 30 * 0x1p-23);  // the residue is rounded once
  }
}

TEST(block_codecs, rotation_is_the_matrix_of_hadamard) {
  Codec codec = kInt8;
  codec.rotate = 32;
  for (std::size_t k = 0; k < 32; ++k) {
    std::vector<float> in(32);
    in[k] = 127.0f;
    const Encoded encoded(codec, in);
    EXPECT_EQ(test::scale_of(encoded.out.data(), 0), 1.0f);
    for (std::size_t i = 0; i < 32; ++i) {
      const int code = test::get<std::int8_t>(encoded.out.data() + kEncodedAlign, i);
      EXPECT_EQ(code, std::popcount(i & k) % 2 == 0 ? 127 : -127);
      EXPECT_EQ(encoded.decoded[i], in[i]);
    }
  }
}

TEST(block_codecs, chance_has_the_right_mean_and_repeats) {
  const std::size_t count = 4096;
  for (const Codec& nearest : kBlockCodecs) {
    Codec codec = nearest;
    codec.stochastic = true;
    const float top = test::top_of(codec);
    const bool whole = codec.kind == CodecKind::block_int;
    const float low = whole ? top - 1 : 416.0f, cell = whole ? 1.0f : 32.0f;
    for (const float share : {0.0f, 0.003f, 0.25f, 0.5f, 0.9f, 1.0f}) {
      std::vector<float> in(count, low + cell * share);
      for (std::size_t i = 0; i < count; i += kCodecBlock) in[i] = top;  // a scale of 1
      const auto codes_of = [&](std::uint64_t seed, std::uint64_t first, std::size_t begin, std::size_t n) {
        Room out(encoded_nbytes(codec, n));
        device::encode(codec, {.out = out.data(),
                               .in = &in[begin],
                               .dtype = DType::float32,
                               .count = n,
                               .seed = seed,
                               .first_index = first});
        return test::decoded(codec, out.data(), n);
      };
      const auto one = codes_of(1, 0, 0, count);
      double sum = 0;
      std::size_t others = 0, up = 0;
      for (std::size_t i = 0; i < count; ++i) {
        if (i % kCodecBlock == 0) continue;
        sum += static_cast<double>(one[i]);
        up += one[i] == low + cell;
        others += one[i] != low && one[i] != low + cell;
      }
      EXPECT_EQ(others, 0u);
      const double n = static_cast<double>(count - count / kCodecBlock);
      const double p = static_cast<double>((in[1] - low) / cell);
      EXPECT_NEAR(static_cast<double>(up), n * p, 5 * std::sqrt(n * p * (1 - p)) + 1e-9);
      const auto tail = codes_of(1, 1024, 1024, count - 1024);  // the same numbers of blocks, in another cut
      EXPECT_TRUE(std::equal(tail.begin(), tail.end(), one.begin() + 1024));
      if (p > 0.1 && p < 0.95) {
        EXPECT_TRUE(codes_of(2, 0, 0, count) != one);
        EXPECT_TRUE(codes_of(1, 1024, 0, count) != one);
      }
    }
  }
}

TEST(block_codecs, bits_do_not_depend_on_the_threads_float_mode) {
  const auto in = test::hard_numbers(5000, 127.0f, 3);
  const Encoded expected(kInt8, in);
  const test::FlushSubnormals flush;
  const Encoded flushed(kInt8, in);
  EXPECT_EQ(std::memcmp(expected.out.data(), flushed.out.data(), expected.out.nbytes()), 0);
  EXPECT_EQ(std::memcmp(expected.error.data(), flushed.error.data(), 4 * in.size()), 0);
}

TEST(block_codecs, bytes_per_element) {
  const std::size_t count = 1 << 20;
  EXPECT_EQ(encoded_nbytes(kInt8, count), count + count / 128);
  EXPECT_EQ(encoded_nbytes(kFp8, count), count + count / 128);
  EXPECT_EQ(encoded_nbytes(kInt4, count), count / 2 + count / 128);
  EXPECT_EQ(encoded_nbytes(test::kSign, count), count / 8 + kEncodedAlign);
  for (const Codec& codec : {kInt8, kInt4, kFp8, test::kSign}) {
    EXPECT_EQ(encoded_nbytes(codec, 0), 0u);
    EXPECT_EQ(encoded_nbytes(codec, 1), 2 * kEncodedAlign);
    for (const std::size_t n : test::awkward_counts()) {
      EXPECT_EQ(encoded_nbytes(codec, n) % kEncodedAlign, 0u);
      EXPECT_LE(encoded_nbytes(codec, n), encoded_nbytes(codec, n + 1));
    }
  }
}

TEST(block_codecs, arguments_are_checked) {
  const auto refused = [](const Codec& codec, const char* part) {
    EXPECT_THROW_WITH(encoded_nbytes(codec, 1), InvalidArgument, part);
  };
  refused({.bits = 5}, "block_int: bits 5");
  refused({.kind = CodecKind::fp8_e4m3, .bits = 4}, "fp8_e4m3: bits 4");
  refused({.kind = CodecKind::sign}, "sign: bits 8");
  refused({.rotate = 16}, "rotate 16");
  refused({.kind = CodecKind::sign, .bits = 1, .rotate = 32}, "rotate is not defined");
  refused({.kind = CodecKind::sign, .bits = 1, .stochastic = true}, "stochastic is not defined");
  std::vector<std::uint32_t> ids;
  for (Codec codec : {kInt8, kInt4, kFp8, test::kSign, Codec{.rotate = 32}, Codec{.stochastic = true}})
    ids.push_back(codec_id(codec));
  std::sort(ids.begin(), ids.end());
  EXPECT_TRUE(std::adjacent_find(ids.begin(), ids.end()) == ids.end());

  Room out(encoded_nbytes(kInt8, 4));
  float in[4] = {}, sum[4] = {};
  std::uint8_t mask[1] = {255};
  const auto wrong = [&](device::Encode args, const char* part) {
    EXPECT_THROW_WITH(device::encode(kInt8, args), InvalidArgument, part);
  };
  const device::Encode good{out.data(), in, DType::float32, 4};
  device::Encode args = good;
  args.out = nullptr, wrong(args, "out is null, count 4");
  args = good, args.out += 8, wrong(args, "not aligned to 64");
  args = good, args.dtype = DType::float64, wrong(args, "in is float64");
  args = good, args.error = sum, args.error_dtype = DType::float16, wrong(args, "error is float16");
  args = good, args.base = sum, args.base_dtype = DType::int8, wrong(args, "base is int8");
  args = good, args.keep = 1.0f, wrong(args, "keep 1");
  args = good, args.first_index = 100, wrong(args, "first_index 100");
  args = good, args.mask = mask, wrong(args, "only sign has one");
  const std::byte* parts[] = {out.data(), nullptr};
  const auto no_decode = [&](const device::Decode& decode, const char* part) {
    EXPECT_THROW_WITH(device::decode_sum(kInt8, decode), InvalidArgument, part);
  };
  no_decode({.out = sum, .in = {}, .count = 4}, "no input");
  no_decode({.out = sum, .in = {parts, 2}, .count = 4}, "in[1] is null");
  no_decode({.out = nullptr, .in = {parts, 1}, .count = 4}, "out is null");
  no_decode({.out = sum, .in = {parts, 1}, .count = 4, .dtype = DType::float64}, "out is float64");
  no_decode({.out = sum, .in = {parts, 1}, .count = 4, .divide_by = 0.0f}, "divide_by 0");
  const std::vector<const std::byte*> many(33, out.data());
  EXPECT_THROW_WITH(device::check_device_decode(kInt8, {.out = sum, .in = many, .count = 4}), InvalidArgument,
                    "33 inputs");
}

}  // namespace
}  // namespace zcomm
