// reduce: every dtype, op, source count and awkward length against a scalar reference, to the bit, on every ISA.
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "device/cpu/kernels_table.hpp"
#include "device/kernels.hpp"
#include "device/reference.hpp"
#include "flush.hpp"
#include "test.hpp"

namespace zcomm {
namespace {

using Bytes = std::vector<std::byte>;
using test::get_real;
using test::get_whole;

struct Setup {
  DType in, out;
  ReduceOp op;
  std::size_t sources, count;
  bool in_place, accumulate, streaming;
};

std::string show(const Setup& s, Isa isa, std::size_t i) {
  return text(name_of(isa), " ", name_of(s.in), "->", name_of(s.out), " ", name_of(s.op), " sources ", s.sources,
              " count ", s.count, s.in_place ? " in place" : "", s.accumulate ? " accumulate" : "",
              s.streaming ? " streaming" : "", ": element ", i);
}

// In the type that the kernel accumulates in: an f32 result of f64 arithmetic is correctly rounded for + * /.
double combine(const Setup& s, double a, double b) {
  double x = 0;
  switch (s.op) {
    case ReduceOp::min:
      x = std::isnan(a) || a < b ? a : b;
      break;
    case ReduceOp::max:
      x = std::isnan(a) || a > b ? a : b;
      break;
    case ReduceOp::prod:
      x = a * b;
      break;
    default:
      x = a + b;
  }
  return s.in == DType::float64 ? x : static_cast<double>(static_cast<float>(x));
}

void reference_real(const Setup& s, const std::vector<Bytes>& src, Bytes& dst) {
  for (std::size_t i = 0; i < s.count; ++i) {
    double x = get_real(s.in, src[0].data(), i);
    for (std::size_t k = 1; k < s.sources; ++k) x = combine(s, x, get_real(s.in, src[k].data(), i));
    if (s.op == ReduceOp::avg) x /= static_cast<double>(s.sources);
    if (s.op == ReduceOp::avg && s.in != DType::float64) x = static_cast<double>(static_cast<float>(x));
    if (s.accumulate) {
      Bytes rounded(8);
      test::put_real(s.out, rounded.data(), 0, x);
      x = get_real(s.out, dst.data(), i) + get_real(s.out, rounded.data(), 0);
      if (s.out != DType::float64) x = static_cast<double>(static_cast<float>(x));
    }
    test::put_real(s.out, dst.data(), i, x);
  }
}

std::int64_t combine(const Setup& s, std::int64_t a, std::int64_t b) {
  const bool boolean = s.in == DType::boolean;
  const auto ua = static_cast<std::uint64_t>(a), ub = static_cast<std::uint64_t>(b);
  std::uint64_t x = 0;
  switch (s.op) {
    case ReduceOp::min:
      x = static_cast<std::uint64_t>(std::min(a, b));
      break;
    case ReduceOp::max:
      x = static_cast<std::uint64_t>(std::max(a, b));
      break;
    case ReduceOp::prod:
      x = boolean ? (ua & ub) : ua * ub;
      break;
    default:
      x = boolean ? (ua | ub) : ua + ub;
  }
  Bytes wrapped(8);
  test::put_whole(s.in, wrapped.data(), 0, static_cast<std::int64_t>(x));
  return get_whole(s.in, wrapped.data(), 0);
}

void reference_whole(const Setup& s, const std::vector<Bytes>& src, Bytes& dst) {
  for (std::size_t i = 0; i < s.count; ++i) {
    std::int64_t x = get_whole(s.in, src[0].data(), i);
    for (std::size_t k = 1; k < s.sources; ++k) x = combine(s, x, get_whole(s.in, src[k].data(), i));
    Setup sum = s;
    sum.op = ReduceOp::sum;
    if (s.accumulate) x = combine(sum, get_whole(s.in, dst.data(), i), x);
    test::put_whole(s.out, dst.data(), i, x);
  }
}

void run(const Setup& s, std::mt19937_64& random) {
  const std::size_t in_size = size_of(s.in), out_size = size_of(s.out);
  const std::size_t shift = s.count % 5;  // elements: buffers begin anywhere
  std::vector<Bytes> src(s.sources, Bytes((s.count + shift) * in_size + 1));
  for (Bytes& bytes : src) {
    test::fill(s.in, bytes.data(), s.count + shift, random);
    bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(shift * in_size));
  }
  Bytes expected(s.count * out_size + 1);
  test::fill(s.out, expected.data(), s.count, random);
  const std::size_t last = s.sources - 1;
  if (s.in_place) expected = src[last];
  const Bytes before = expected;
  Bytes second = before;
  is_floating(s.in) ? reference_real(s, src, expected) : reference_whole(s, src, expected);

  for (const Isa isa : test::isas()) {
    std::vector<Bytes> inputs = src;
    std::vector<std::byte> raw((s.count + shift) * out_size + 1);
    std::byte* dst = s.in_place ? inputs[last].data() : raw.data() + shift * out_size;
    std::copy(before.begin(), before.end(), dst);
    std::copy(before.begin(), before.end(), second.begin());
    std::vector<const void*> pointers;
    for (const Bytes& bytes : inputs) pointers.push_back(bytes.data());
    void* const outputs[] = {dst, second.data()};
    device::kernel_table(isa).reduce(
        {outputs, 2, pointers.data(), s.sources, s.count, s.in, s.out, s.op, s.accumulate, s.streaming});
    for (std::size_t i = 0; i < s.count; ++i)
      if (!test::same_element(s.out, dst, expected.data(), i) ||
          !test::same_element(s.out, second.data(), expected.data(), i))
        return test::fail(__FILE__, __LINE__, show(s, isa, i));
    if (dst[s.count * out_size] != before[s.count * out_size])
      return test::fail(__FILE__, __LINE__, show(s, isa, s.count) + " was overwritten");
  }
}

void run_all(DType in, DType out, const std::vector<std::size_t>& counts) {
  std::mt19937_64 random(static_cast<unsigned>(in) * 10 + static_cast<unsigned>(out));
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod}) {
    if (op == ReduceOp::avg && !is_floating(in)) continue;
    for (std::size_t sources = 1; sources <= 5; ++sources)
      for (const std::size_t count : counts)
        for (int mode = 0; mode < 8; ++mode) {
          const bool in_place = mode & 1, accumulate = mode & 2, streaming = mode & 4;
          if (streaming && (accumulate || in_place)) continue;
          if (in_place && in != out) continue;
          run({in, out, op, sources, count, in_place, accumulate, streaming}, random);
        }
  }
}

std::vector<std::size_t> awkward_counts() {
  std::vector<std::size_t> counts;
  for (std::size_t count = 0; count <= 70; ++count) counts.push_back(count);
  counts.insert(counts.end(), {1000, 1024, 4097});
  return counts;
}

TEST(reduce, every_integer_type) {
  for (const DType dtype : {DType::int8, DType::uint8, DType::int32, DType::int64, DType::boolean})
    run_all(dtype, dtype, awkward_counts());
}
TEST(reduce, f32_and_f64) {
  for (const DType dtype : {DType::float32, DType::float64}) run_all(dtype, dtype, awkward_counts());
}
TEST(reduce, f16_and_bf16) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) run_all(dtype, dtype, awkward_counts());
}
TEST(reduce, f16_and_bf16_into_f32) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) run_all(dtype, DType::float32, awkward_counts());
}

TEST(reduce, bool_bytes_other_than_one_are_true) {
  const std::uint8_t a[] = {0, 2, 4, 0}, b[] = {0, 1, 0, 8};
  std::uint8_t out[4];
  void* const dst[] = {out};
  const void* const src[] = {a, b};
  device::reduce({dst, src, 4, DType::boolean, DType::boolean, ReduceOp::min});
  EXPECT_TRUE(out[0] == 0 && out[1] == 1 && out[2] == 0 && out[3] == 0);
  device::reduce({dst, src, 4, DType::boolean, DType::boolean, ReduceOp::sum});
  EXPECT_TRUE(out[0] == 0 && out[1] == 1 && out[2] == 1 && out[3] == 1);
}

TEST(reduce, large_calls_choose_streaming_by_themselves) {
  const std::size_t count = (1 << 21) + 13;
  std::vector<float> a(count + 3, 1.5f), b(count + 3, 2.25f), out(count + 3, -1.0f);
  for (const auto stores : {device::Stores::automatic, device::Stores::cached, device::Stores::streaming}) {
    void* const dst[] = {out.data() + 1};
    const void* const src[] = {a.data() + 2, b.data()};
    device::reduce({dst, src, count, DType::float32, DType::float32, ReduceOp::sum, false, stores});
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) wrong += out[i + 1] != 3.75f;
    EXPECT_EQ(wrong, 0u);
    EXPECT_EQ(out[0], -1.0f);
    EXPECT_EQ(out[count + 1], -1.0f);
    std::fill(out.begin(), out.end(), -1.0f);
  }
}

TEST(reduce, streaming_hint_is_ignored_in_place) {
  std::vector<float> a(100, 1.0f), b(100, 2.0f);
  void* const dst[] = {a.data()};
  const void* const src[] = {a.data(), b.data()};
  device::reduce({dst, src, 100, DType::float32, DType::float32, ReduceOp::avg, false, device::Stores::streaming});
  EXPECT_EQ(a[0], 1.5f);
  EXPECT_EQ(a[99], 1.5f);
}

TEST(reduce, subnormals_are_kept_whatever_the_caller_does_with_them) {
  constexpr float kTiny = 1e-40f, kDoubled = kTiny + kTiny;  // computed here, because it would be zero below
  std::vector<float> a(100, kTiny), sum(100), wide(100);
  std::vector<std::uint16_t> half(100, 1);  // the smallest float16
  void* const dst[] = {sum.data()};
  const void* const src[] = {a.data(), a.data()};
  {
    const test::FlushSubnormals flush;
    device::reduce({dst, src, 100, DType::float32, DType::float32, ReduceOp::sum});
    device::cast(wide.data(), DType::float32, half.data(), DType::float16, 100);
    device::cast(half.data(), DType::float16, wide.data(), DType::float32, 100);
  }
  EXPECT_TRUE(kDoubled > 0);
  EXPECT_EQ(sum, std::vector<float>(100, kDoubled));
  EXPECT_EQ(wide, std::vector<float>(100, 0x1p-24f));
  EXPECT_EQ(half, std::vector<std::uint16_t>(100, 1));
}

TEST(reduce, in_parts_gives_the_same) {
  constexpr std::size_t count = 3'000'017;
  ThreadPool::set_default_size(3);
  std::vector<std::uint16_t> a(count), b(count);
  for (std::size_t i = 0; i < count; ++i)
    a[i] = static_cast<std::uint16_t>(0x3f00 + i % 300), b[i] = static_cast<std::uint16_t>(i % 7);
  for (const bool accumulate : {false, true})
    for (const std::size_t n : {std::size_t{5}, count}) {
      std::vector<float> whole(count, 3.0f), parts(count, 3.0f);
      void* const to_whole[] = {whole.data()};
      void* const to_parts[] = {parts.data()};
      const void* const src[] = {a.data(), b.data()};
      device::reduce({to_whole, src, n, DType::bfloat16, DType::float32, ReduceOp::sum, accumulate});
      device::reduce_in_parts({to_parts, src, n, DType::bfloat16, DType::float32, ReduceOp::sum, accumulate});
      EXPECT_TRUE(std::memcmp(whole.data(), parts.data(), count * sizeof(float)) == 0);
      EXPECT_TRUE(whole[n - 1] != 3.0f);
    }
  std::vector<float> whole(count, 3.0f), beside(count, 3.0f);  // during another loop
  void* const to_whole[] = {whole.data()};
  void* const to_beside[] = {beside.data()};
  const void* const src[] = {a.data(), b.data()};
  device::reduce({to_whole, src, count, DType::bfloat16, DType::float32, ReduceOp::sum, true});
  ThreadPool::shared().parallel_for(2, 1, 0, [&](std::size_t begin, std::size_t) {
    if (begin != 0) return;
    std::thread([&] {
      device::reduce_in_parts({to_beside, src, count, DType::bfloat16, DType::float32, ReduceOp::sum, true});
    }).join();
  });
  EXPECT_EQ(whole, beside);
  void* const to[] = {a.data()};
  const void* const none[] = {nullptr};
  EXPECT_THROW_WITH(device::reduce_in_parts({to, none, count, DType::bfloat16, DType::bfloat16, ReduceOp::sum}),
                    InvalidArgument, "src[0] is null");
  ThreadPool::set_default_size(1);
}

TEST(reduce, refuses_what_it_cannot_do) {
  float x = 1;
  void* const dst[] = {&x};
  const void* const src[] = {&x};
  void* const null_dst[] = {nullptr};
  const void* const null_src[] = {&x, nullptr};
  using device::reduce;
  EXPECT_THROW_WITH(reduce({{}, src, 1, DType::float32, DType::float32, ReduceOp::sum}), InvalidArgument,
                    "got 0 and 1");
  EXPECT_THROW_WITH(reduce({dst, {}, 1, DType::float32, DType::float32, ReduceOp::sum}), InvalidArgument,
                    "got 1 and 0");
  EXPECT_THROW_WITH(reduce({dst, src, 1, DType::int32, DType::int32, ReduceOp::avg}), InvalidArgument, "avg of int32");
  EXPECT_THROW_WITH(reduce({dst, src, 1, DType::boolean, DType::boolean, ReduceOp::avg}), InvalidArgument,
                    "avg of bool");
  EXPECT_THROW_WITH(reduce({dst, src, 1, DType::float32, DType::bfloat16, ReduceOp::sum}), InvalidArgument,
                    "out bfloat16");
  EXPECT_THROW_WITH(reduce({dst, src, 1, DType::int8, DType::float32, ReduceOp::sum}), InvalidArgument, "in int8");
  EXPECT_THROW_WITH(reduce({null_dst, src, 3, DType::float32, DType::float32, ReduceOp::sum}), InvalidArgument,
                    "dst[0] is null");
  EXPECT_THROW_WITH(reduce({dst, null_src, 3, DType::float32, DType::float32, ReduceOp::sum}), InvalidArgument,
                    "src[1] is null");
  reduce({null_dst, null_src, 0, DType::float32, DType::float32, ReduceOp::sum});  // nothing to do
}

}  // namespace
}  // namespace zcomm
