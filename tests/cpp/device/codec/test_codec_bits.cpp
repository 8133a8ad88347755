// Codecs have the same bits on every instruction set and machine (emulated CUDA, simulated, a GPU if there is one).
#include <algorithm>

#include "device/codec/cases.hpp"
#include "device/machine.hpp"
#include "device/stream_kernels.hpp"

namespace zcomm {
namespace {

using test::kInt8;
using test::Machine;

struct CodecCase {
  Codec codec;
  DType in;
  DType error, base;  // boolean: none
  float keep;
  bool masked;
  std::size_t count;
  std::uint64_t seed;
};

std::string show(const CodecCase& c) {
  return text(test::show(c.codec), " in ", name_of(c.in), " error ", name_of(c.error), " base ", name_of(c.base),
              " keep ", c.keep, c.masked ? " masked" : "", " count ", c.count);
}

/// All codecs and options, each with a few combinations of the others.
std::vector<CodecCase> codec_cases() {
  const DType none = DType::boolean;
  const DType ins[] = {DType::float32, DType::bfloat16, DType::float16};
  const DType errors[] = {none, DType::float32, DType::bfloat16, DType::int8};
  const DType bases[] = {none, DType::bfloat16, DType::float32, none, DType::float16};
  std::vector<CodecCase> all;
  std::uint64_t turn = 0;
  for (const CodecKind kind : {CodecKind::block_int, CodecKind::fp8_e4m3, CodecKind::sign})
    for (const int bits : {8, 4, 1})
      for (const int rotate : {0, 32})
        for (const bool stochastic : {false, true}) {
          const Codec codec{kind, bits, rotate, stochastic};
          const bool is_sign = kind == CodecKind::sign;
          if (is_sign ? bits != 1 || rotate != 0 || stochastic : bits == 1) continue;
          if (kind == CodecKind::fp8_e4m3 && bits != 8) continue;
          for (const std::size_t count : test::awkward_counts()) {
            if (count < 32 && (count + turn) % 5 != 0) continue;
            if (++turn % 7 != 0 && test::few_values()) continue;  // prime to the choices below
            all.push_back({codec, ins[turn % 3], errors[turn / 3 % 4], bases[turn % 5], turn % 2 == 0 ? 0.0f : 0.8f,
                           is_sign && turn % 2 == 0, count, turn});
          }
        }
  return all;
}

std::size_t line_up(std::size_t nbytes) { return nbytes / 64 * 64 + 128; }  // and at least 64 behind it

std::size_t error_nbytes(const CodecCase& c) {
  return c.error == DType::int8 ? encoded_nbytes(kInt8, c.count) : c.count * sizeof(float);
}

/// The buffers of an encode and a decode, one after the other at multiples of 64 bytes.
struct Buffers {
  Buffers(const CodecCase& c, std::byte* memory)
      : in(memory),
        error(in + line_up(c.count * sizeof(float))),
        base(error + line_up(error_nbytes(c))),
        mask(base + line_up(c.count * sizeof(float))),
        out(mask + line_up(c.count / 8)),
        sum(out + line_up(encoded_nbytes(c.codec, c.count))) {}
  static std::size_t nbytes(const CodecCase& c) {
    return 3 * line_up(c.count * sizeof(float)) + line_up(error_nbytes(c)) + line_up(c.count / 8) +
           line_up(encoded_nbytes(c.codec, c.count));
  }
  std::byte *in, *error, *base, *mask, *out, *sum;
};

/// A quarter of the cases also has infinities and NaN.
void fill_case(const CodecCase& c, const Buffers& at) {
  std::memset(at.in, 0x5a, Buffers::nbytes(c));
  std::mt19937_64 random(c.seed);
  auto in = test::hard_numbers(c.count, test::top_of(c.codec), c.seed);
  if (c.in == DType::float16)
    for (float& x : in) x = std::ldexp(static_cast<float>(random() >> 40), static_cast<int>(random() % 8) - 20);
  for (std::size_t i = 0; i < c.count; ++i) test::put_real(c.in, at.in, i, static_cast<double>(in[i]));
  if (c.seed % 4 == 0) test::fill(c.in, at.in, c.count, random);
  if (c.error == DType::int8) {
    std::vector<float> error(c.count);
    for (float& e : error) e = static_cast<float>(random() >> 40) * 0x1p-30f;
    device::encode(kInt8, {at.error, error.data(), DType::float32, c.count});
  } else if (c.error != DType::boolean) {
    for (std::size_t i = 0; i < c.count; ++i) test::put_real(c.error, at.error, i, static_cast<double>(in[i]) * 1e-3);
  }
  if (c.base != DType::boolean)
    for (std::size_t i = 0; i < c.count; ++i) test::put_real(c.base, at.base, i, static_cast<double>(in[i]) * 0.99);
  for (std::size_t i = 0; i <= c.count / 8; ++i) at.mask[i] = static_cast<std::byte>(random());
  std::memset(at.sum, 0, c.count * size_of(c.in));
}

device::Encode encode_args(const CodecCase& c, const Buffers& at) {
  device::Encode args{at.out, at.in, c.in, c.count};
  if (c.error != DType::boolean) args.error = at.error, args.error_dtype = c.error;
  if (c.base != DType::boolean) args.base = at.base, args.base_dtype = c.base;
  if (c.masked) args.mask = reinterpret_cast<const std::uint8_t*>(at.mask);
  args.keep = c.keep;
  args.seed = c.seed;
  args.first_index = c.seed % 7 * kCodecBlock + (c.seed % 3 == 0 ? std::uint64_t{1} << 40 : 0);
  return args;
}

/// Adds the encoded part twice.
device::Decode decode_args(const CodecCase& c, const Buffers& at, const std::byte* const (&parts)[2]) {
  return {.out = at.sum,
          .in = parts,
          .count = c.count,
          .dtype = c.in,
          .accumulate = c.seed % 2 == 0,
          .divide_by = c.seed % 3 == 0 ? 2.5f : 1.0f,
          .mask = c.masked ? reinterpret_cast<const std::uint8_t*>(at.mask) : nullptr};
}

/// Equal bytes, but that a NaN equals a NaN.
bool same_values(DType dtype, const std::byte* a, const std::byte* b, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    if (!test::same_element(dtype, a, b, i)) return false;
  return std::memcmp(a + count * size_of(dtype), b + count * size_of(dtype), 64) == 0;
}

void compare_case(const CodecCase& c, const std::string& name, const Buffers& got, const Buffers& expected) {
  const auto check = [&](const char* what, bool same) {
    if (!same) test::fail(__FILE__, __LINE__, text(name, ": ", show(c), ": ", what, " differs"));
  };
  check("out", std::memcmp(got.out, expected.out, encoded_nbytes(c.codec, c.count) + 64) == 0);
  if (c.error == DType::int8) check("error", std::memcmp(got.error, expected.error, error_nbytes(c) + 64) == 0);
  if (c.error == DType::float32 || c.error == DType::bfloat16)
    check("error", same_values(c.error, got.error, expected.error, c.count));
  if (c.base != DType::boolean) check("base", same_values(c.base, got.base, expected.base, c.count));
  check("sum", same_values(c.in, got.sum, expected.sum, c.count));
}

/// Encoder and decoder, on `memory`, against the plain kernels.
template <class Encoder, class Decoder>
void run_case(const CodecCase& c, const std::string& name, std::byte* memory, const Encoder& encode,
              const Decoder& decode) {
  const auto& plain = device::codec_table(Isa::plain);
  test::Room own(Buffers::nbytes(c));
  const Buffers expected(c, own.data()), got(c, memory);
  fill_case(c, expected), fill_case(c, got);
  device::encode_with(plain, c.codec, encode_args(c, expected));
  const std::byte* const twice[2] = {expected.out, expected.out};
  device::decode_sum_with(plain, c.codec, decode_args(c, expected, twice));
  encode(encode_args(c, got));
  const std::byte* const parts[2] = {got.out, got.out};
  decode(decode_args(c, got, parts));
  compare_case(c, name, got, expected);
}

TEST(codec_bits, every_instruction_set_has_those_of_plain_code) {
  for (const CodecCase& c : codec_cases())
    for (const Isa isa : test::isas()) {
      if (isa == Isa::plain) continue;
      test::Room memory(Buffers::nbytes(c));
      run_case(
          c, std::string(name_of(isa)), memory.data(),
          [&](const device::Encode& args) { device::encode_with(device::codec_table(isa), c.codec, args); },
          [&](const device::Decode& args) { device::decode_sum_with(device::codec_table(isa), c.codec, args); });
    }
}

/// Quotients next to the middle between two codes, for all 128 significands of a scale: a wrong last bit of a quotient
/// would show.
TEST(codec_bits, quotients_are_rounded_correctly_on_every_instruction_set) {
  const int shift = test::few_values() ? 16 : 1;
  for (const Codec& codec : {kInt8, test::kInt4, test::kFp8})
    for (const int exponent : {0, 100, -99, -100, -101, -118})
      for (int significand = 128; significand < 256; significand += shift) {
        const float scale = std::ldexp(static_cast<float>(significand), exponent - 7), top = test::top_of(codec);
        std::vector<float> in;
        for (int code = 0; code < (codec.kind == CodecKind::fp8_e4m3 ? 126 : static_cast<int>(top)); ++code) {
          const double middle =
              codec.kind == CodecKind::fp8_e4m3 ? (test::e4m3(code) + test::e4m3(code + 1)) / 2 : code + 0.5;
          float x = static_cast<float>(middle * static_cast<double>(scale));
          for (int k = 0; k < 2; ++k) x = std::nextafter(x, 0.0f);
          for (int k = 0; k < 5; ++k, x = std::nextafter(x, 1e38f)) {
            if (in.size() % kCodecBlock == 0) in.push_back(top * scale);
            in.push_back((code + k) % 2 == 0 ? x : -x);
          }
        }
        test::Room expected(encoded_nbytes(codec, in.size())), got(expected);
        const auto encode = [&](Isa isa, test::Room& out) {
          device::encode_with(device::codec_table(isa), codec, {out.data(), in.data(), DType::float32, in.size()});
        };
        encode(Isa::plain, expected);
        EXPECT_EQ(test::scale_of(expected.data(), 0), scale);
        for (const Isa isa : test::isas()) {
          encode(isa, got);
          EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.nbytes()), 0);
        }
      }
}

TEST(codec_bits, every_machine_has_those_of_plain_code) {
  for (const auto& machine : test::machines())
    for (const CodecCase& c : codec_cases()) {
      std::byte* memory = machine->memory(Buffers::nbytes(c));
      run_case(
          c, machine->name(), memory,
          [&](const device::Encode& args) {
            machine->encode(c.codec, args);
            machine->synchronize();
          },
          [&](const device::Decode& args) {
            machine->decode_sum(c.codec, args);
            machine->synchronize();
          });
    }
}

/// Records the memory that tasks touch.
class Toucher final : public device::StreamKernels {
 public:
  void reduce(const device::Reduce&) override {}
  void cast(void*, DType, const void*, DType, std::size_t) override {}
  void run(const device::KernelTask& task) override {
    touched.clear();
    task.copy()->touch([this](const device::Touched& each) { touched.push_back(each); });
  }
  bool has(const void* data, std::size_t nbytes, bool written) const {
    return std::any_of(touched.begin(), touched.end(), [&](const device::Touched& each) {
      return each.data == data && each.nbytes == nbytes && each.written == written;
    });
  }
  std::vector<device::Touched> touched;
};

TEST(codec_bits, tasks_name_the_memory_that_they_touch) {
  const std::size_t count = 1000;
  alignas(64) static std::byte memory[5][8192];
  Toucher kernels;
  device::Encode args{memory[0], memory[1], DType::bfloat16, count, memory[2]};
  args.base = memory[3];
  args.base_dtype = DType::float16;
  kernels.encode(kInt8, args);
  EXPECT_EQ(kernels.touched.size(), 4u);
  EXPECT_TRUE(kernels.has(memory[0], encoded_nbytes(kInt8, count), true));
  EXPECT_TRUE(kernels.has(memory[1], 2 * count, false));
  EXPECT_TRUE(kernels.has(memory[2], 4 * count, true));
  EXPECT_TRUE(kernels.has(memory[3], 2 * count, true));
  args.error_dtype = DType::int8;
  kernels.encode(kInt8, args);
  EXPECT_TRUE(kernels.has(memory[2], encoded_nbytes(kInt8, count), true));
  args = {memory[0], memory[1], DType::float32, count};
  args.mask = reinterpret_cast<const std::uint8_t*>(memory[4]);
  kernels.encode(test::kSign, args);
  EXPECT_EQ(kernels.touched.size(), 3u);
  EXPECT_TRUE(kernels.has(memory[4], 125, false));
  const std::byte* const parts[] = {memory[0], memory[2]};
  kernels.decode_sum(kInt8, {.out = memory[1], .in = parts, .count = count});
  EXPECT_EQ(kernels.touched.size(), 3u);
  EXPECT_TRUE(kernels.has(memory[0], encoded_nbytes(kInt8, count), false));
  EXPECT_TRUE(kernels.has(memory[2], encoded_nbytes(kInt8, count), false));
  EXPECT_TRUE(kernels.has(memory[1], 4 * count, true));
}

}  // namespace
}  // namespace zcomm
