// decode_sum: the order of the sum, its roundings, stores, threads.
#include "base/thread_pool.hpp"
#include "device/codec/cases.hpp"

namespace zcomm {
namespace {

using test::kFp8;
using test::kInt4;
using test::kInt8;
using test::kSign;
using test::Room;

const Codec kAllCodecs[] = {kInt8, kInt4, kFp8, kSign, Codec{.bits = 4, .rotate = 32}};

std::vector<float> random_numbers(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> all(count);
  for (float& x : all)
    x = std::ldexp(static_cast<float>(random() >> 40) - 0x1p23f, static_cast<int>(seed % 5) * 8 - 40);
  return all;
}

struct Inputs {
  Inputs(const Codec& codec, std::size_t ranks, std::size_t count) {
    for (std::size_t r = 0; r < ranks; ++r) {
      parts.emplace_back(encoded_nbytes(codec, count));
      const auto in = random_numbers(count, r + 1);
      device::encode(codec, {parts[r].data(), in.data(), DType::float32, count});
      each.push_back(test::decoded(codec, parts[r].data(), count));
    }
    for (const Room& part : parts) pointers.push_back(part.data());
  }
  std::vector<Room> parts;
  std::vector<const std::byte*> pointers;
  std::vector<std::vector<float>> each;
};

TEST(decode_sum, adds_ranks_in_order_divides_and_rounds_once) {
  for (const Codec& codec : kAllCodecs)
    for (const std::size_t ranks : {1u, 2u, 3u, 5u})
      for (const std::size_t count : {1u, 33u, 250u, 1111u}) {
        const Inputs inputs(codec, ranks, count);
        for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16})
          for (const bool accumulate : {false, true})
            for (const float divide_by : {1.0f, 3.0f}) {
              Room out(count * size_of(dtype)), expected(out);
              const auto old = random_numbers(count, 9);
              for (std::size_t i = 0; i < count; ++i) {
                test::put_real(dtype, out.data(), i, static_cast<double>(old[i]));
                float sum = inputs.each[0][i];
                for (std::size_t r = 1; r < ranks; ++r) sum += inputs.each[r][i];
                if (divide_by != 1.0f) sum /= divide_by;
                if (accumulate) sum = static_cast<float>(test::get_real(dtype, out.data(), i)) + sum;
                test::put_real(dtype, expected.data(), i, static_cast<double>(sum));
              }
              device::decode_sum(codec, {out.data(), inputs.pointers, count, dtype, accumulate, divide_by});
              if (std::memcmp(out.data(), expected.data(), out.nbytes()) != 0 || !out.guarded())
                return test::fail(__FILE__, __LINE__,
                                  text(test::show(codec), " ranks ", ranks, " count ", count, " ", name_of(dtype)));
            }
      }
}

TEST(decode_sum, the_order_of_ranks_counts) {
  const std::size_t count = 1000;
  const Inputs inputs(kInt8, 5, count);
  std::vector<const std::byte*> reversed(inputs.pointers.rbegin(), inputs.pointers.rend());
  std::vector<float> a(count), b(count);
  device::decode_sum(kInt8, {.out = a.data(), .in = inputs.pointers, .count = count});
  device::decode_sum(kInt8, {.out = b.data(), .in = reversed, .count = count});
  EXPECT_TRUE(a != b);
}

TEST(decode_sum, streaming_stores_change_no_bit) {
  for (const Codec& codec : kAllCodecs)
    for (const DType dtype : {DType::float32, DType::bfloat16})
      for (const std::size_t count : {31u, 1000u, 4096u}) {
        const Inputs inputs(codec, 2, count);
        Room cached(count * size_of(dtype)), streamed(count * size_of(dtype) + 4);
        std::byte* const shifted = streamed.data() + 4;  // not at a line's begin
        device::Decode args{.out = cached.data(), .in = inputs.pointers, .count = count, .dtype = dtype};
        args.stores = device::Stores::cached;
        device::decode_sum(codec, args);
        args.out = shifted;
        args.stores = device::Stores::streaming;
        device::decode_sum(codec, args);
        EXPECT_EQ(std::memcmp(cached.data(), shifted, cached.nbytes()), 0);
        EXPECT_TRUE(cached.guarded() && streamed.guarded());
      }
}

TEST(decode_sum, several_threads_change_no_bit) {
  test::threads_may_stay() = true;  // the pool's
  const std::size_t count = test::few_values() ? (1 << 20) + 77 : 3'000'077;
  const auto in = random_numbers(count, 4);
  for (const Codec& codec : kAllCodecs) {
    Room one(encoded_nbytes(codec, count)), several(one);
    std::vector<float> error_one(count, 0.5f), error_several(count, 0.5f), sum_one(count), sum_several(count);
    device::Encode args{one.data(), in.data(), DType::float32, count, error_one.data()};
    device::encode(codec, args);
    args.out = several.data();
    args.error = error_several.data();
    device::encode_in_parts(codec, args);
    EXPECT_EQ(std::memcmp(one.data(), several.data(), one.nbytes()), 0);
    EXPECT_TRUE(error_one == error_several);
    const std::byte* parts[] = {one.data(), several.data()};
    device::decode_sum(codec, {.out = sum_one.data(), .in = parts, .count = count});
    device::decode_sum_in_parts(codec, {.out = sum_several.data(), .in = parts, .count = count});
    EXPECT_TRUE(sum_one == sum_several);
  }
}

}  // namespace
}  // namespace zcomm
