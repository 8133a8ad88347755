// The element kernels of every machine (emulated CUDA; a GPU if there is one) against the host's, bit by bit: all
// types, counts around the widths of vectors and blocks, alignments, and numbers of every kind.
#include <cstring>

#include "base/error.hpp"
#include "device/emulated_kernels.hpp"
#include "device/machine.hpp"
#include "device/reference.hpp"
#include "test.hpp"

namespace zcomm {
namespace {

using test::Machine;

const DType kAll[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::int8,
                      DType::uint8,   DType::int32,   DType::int64,   DType::boolean};
const DType kFloats[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};
const DType kScaled[] = {DType::float32, DType::float16, DType::bfloat16};
constexpr std::size_t kGuard = 64;  // bytes after a result that must not change

/// Counts 0 to 40, then the neighbours of multiples of 128 and of blocks of 256 threads times 4, up to `most`.
std::vector<std::size_t> counts(std::size_t most) {
  std::vector<std::size_t> all;
  for (std::size_t n = 0; n <= 40; ++n) all.push_back(n);
  for (std::size_t n = 128; n <= most; n += n < 1024 ? 128 : 1024)
    for (const std::size_t m : {n - 1, n, n + 1, n + 5}) all.push_back(m);
  return all;
}

void expect_same(const Machine& machine, DType dtype, const std::byte* got, const std::byte* expected,
                 std::size_t count, const std::string& what) {
  for (std::size_t i = 0; i < count; ++i)
    if (!test::same_element(dtype, got, expected, i))
      return test::fail(__FILE__, __LINE__, text(machine.name(), ": ", what, ": element ", i, " of ", count));
  if (std::memcmp(got + count * size_of(dtype), expected + count * size_of(dtype), kGuard) != 0)
    test::fail(__FILE__, __LINE__, text(machine.name(), ": ", what, ": wrote behind ", count, " elements"));
}

void compare_reduce(Machine& machine, DType in, DType out, ReduceOp op, std::size_t sources, std::size_t count,
                    std::size_t shift, bool accumulate, int remote = 0) {
  std::mt19937_64 random(count + sources);
  const std::size_t room = (count + shift) * 8 + 256;
  const std::size_t stride = room / 256 * 256 + 256;
  std::byte* memory = machine.memory((sources + 2) * stride);
  std::vector<const void*> src;
  for (std::size_t s = 0; s < sources; ++s) {
    std::byte* data = memory + s * stride + shift * size_of(in);
    test::fill(in, data, count, random);
    src.push_back(data);
  }
  std::vector<std::byte> expected(count * size_of(out) + kGuard, std::byte{0x5a});
  std::byte* results[2] = {memory + sources * stride + shift * size_of(out),
                           memory + (sources + 1) * stride + shift * size_of(out)};
  test::fill(out, expected.data(), count, random);
  for (std::byte* result : results) std::memcpy(result, expected.data(), expected.size());
  void* const host_dst[] = {expected.data()};
  device::reduce({host_dst, src, count, in, out, op, accumulate});
  machine.reduce({.dst = std::span<void* const>(reinterpret_cast<void* const*>(results), 2),
                  .src = src,
                  .count = count,
                  .in = in,
                  .out = out,
                  .op = op,
                  .accumulate = accumulate,
                  .remote = remote});
  machine.synchronize();
  for (const std::byte* result : results)
    expect_same(machine, out, result, expected.data(), count,
                text("reduce ", name_of(in), "->", name_of(out), " ", name_of(op), " sources ", sources, " shift ",
                     shift, accumulate ? " accumulate" : ""));
}

TEST(machines, reduce_equals_the_host) {
  for (const auto& machine : test::machines())
    for (const DType in : kAll)
      for (const DType out : {in, DType::float32}) {
        if (out != in && in != DType::float16 && in != DType::bfloat16) continue;
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod}) {
          if (op == ReduceOp::avg && !is_floating(in)) continue;
          std::size_t turn = 0;
          for (const std::size_t count : counts(1100)) {
            if (count == 0) continue;
            ++turn;
            compare_reduce(*machine, in, out, op, 1 + turn % 5, count, turn / 5 % 2 * (turn % 3), turn % 2 == 0);
          }
          for (const std::size_t sources : {1u, 2u, 3u, 8u})
            for (const std::size_t shift : {0u, 1u, 2u, 4u})
              compare_reduce(*machine, in, out, op, sources, 263, shift, sources == 3);
        }
      }
}

TEST(machines, a_reduction_over_a_link_takes_few_blocks_and_has_the_same_bits) {
  struct Case {
    int remote;
    unsigned of_words, of_packs;  // blocks that have 1 MiB on the way in loads of 4 and of 16 bytes
  };
  for (const auto& machine : test::machines())
    for (const Case c : {Case{0, 1024, 300}, Case{1, 1024, 256}, Case{3, 341, 85}, Case{7, 256, 64}}) {
      const auto sources = static_cast<std::size_t>(c.remote) + 1;
      const std::size_t packs = 256 * 300;
      compare_reduce(*machine, DType::float32, DType::float32, ReduceOp::sum, sources, 4 * packs + 3, 1, false,
                     c.remote);
      const unsigned of_words = device::emulated::last_grid();
      compare_reduce(*machine, DType::bfloat16, DType::bfloat16, ReduceOp::avg, sources, 8 * packs, 0, true, c.remote);
      if (machine->name() != "emulation") continue;
      EXPECT_EQ(of_words, c.of_words);
      EXPECT_EQ(device::emulated::last_grid(), c.of_packs);
    }
}

/// All 16-bit values; else bits of every kind.
void fill_bits(DType dtype, std::byte* data, std::size_t count, std::mt19937_64& random) {
  for (std::size_t i = 0; i < count; ++i) {
    if (size_of(dtype) == 2) test::put(data, i, static_cast<std::uint16_t>(i));
    if (dtype == DType::float32) test::put(data, i, static_cast<std::uint32_t>(random()));
    if (dtype == DType::float64)
      test::put(data, i,
                i % 8 == 0 ? std::bit_cast<double>(random())
                           : static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(random()))) *
                                 (i % 3 == 0 ? 1.0 : 1 + 1e-9));
  }
}

TEST(machines, cast_equals_the_host_on_all_values) {
  const std::size_t count = 2 * 65536, nbytes = count * 8 + 256;
  for (const auto& machine : test::machines())
    for (const DType from : kFloats)
      for (const DType to : kFloats) {
        if (from == to) continue;  // a copy
        std::mt19937_64 random(1);
        std::byte *in = machine->memory(2 * nbytes), *out = in + nbytes;
        fill_bits(from, in, count, random);
        std::vector<std::byte> expected(count * 8);
        device::cast(expected.data(), to, in, from, count);
        machine->cast(out, to, in, from, count);
        machine->synchronize();
        std::size_t wrong = 0;  // NaN payloads, too: cast has no arithmetic that a device could do in its own way
        for (std::size_t i = 0; i < count; ++i)
          wrong += std::memcmp(out + i * size_of(to), expected.data() + i * size_of(to), size_of(to)) != 0;
        if (wrong != 0)
          test::fail(__FILE__, __LINE__, text(machine->name(), ": ", name_of(from), "->", name_of(to), ": ", wrong));
      }
}

TEST(machines, cast_and_scale_at_every_count_and_alignment) {
  for (const auto& machine : test::machines())
    for (const DType from : kFloats)
      for (const DType to : kFloats) {
        const bool scaled = from != DType::float64 && to != DType::float64;
        std::mt19937_64 random(3);
        for (const std::size_t count : counts(4200))
          for (const std::size_t shift : {0u, 1u}) {
            if (count == 0) continue;
            const std::size_t stride = (count + 1) * 8 / 256 * 256 + 512;
            std::byte* in = machine->memory(2 * stride + 256) + shift * size_of(from);
            std::byte* out = machine->memory(0) + stride + (count % 2 == 0 ? shift : 0) * size_of(to);
            test::fill(from, in, count, random);
            std::vector<std::byte> expected(count * size_of(to) + kGuard, std::byte{0x5a});
            if (from != to) {
              std::memcpy(out, expected.data(), expected.size());
              device::cast(expected.data(), to, in, from, count);
              machine->cast(out, to, in, from, count);
              machine->synchronize();
              expect_same(*machine, to, out, expected.data(), count, text("cast ", name_of(from), "->", name_of(to)));
            }
            if (!scaled) continue;
            const float factor = count % 3 == 0 ? 1e-7f : count % 3 == 1 ? 3.0e4f : 0.3f;
            auto* extra = reinterpret_cast<std::uint64_t*>(machine->memory(0) + 2 * stride);
            auto* more = reinterpret_cast<float*>(extra + 1);
            extra[0] = 5;
            *more = 0.37f;
            const float* use = count % 2 == 0 ? more : nullptr;
            std::memset(expected.data(), 0x5a, expected.size());
            std::memcpy(out, expected.data(), expected.size());
            std::uint64_t nonfinite = 5;
            device::scale({expected.data(), to, in, from, count, factor, use, &nonfinite});
            machine->scale({out, to, in, from, count, factor, use, count % 5 == 0 ? nullptr : extra});
            machine->synchronize();
            expect_same(*machine, to, out, expected.data(), count, text("scale ", name_of(from), "->", name_of(to)));
            if (count % 5 != 0) EXPECT_EQ(extra[0], nonfinite);
          }
      }
}

TEST(machines, scale_in_place) {
  for (const auto& machine : test::machines())
    for (const DType dtype : kScaled) {
      const std::size_t count = 1003;
      std::mt19937_64 random(5);
      std::byte* data = machine->memory(count * 4 + kGuard);
      std::vector<std::byte> expected(count * size_of(dtype) + kGuard, std::byte{1});
      test::fill(dtype, expected.data(), count, random);
      std::memcpy(data, expected.data(), expected.size());
      device::scale({expected.data(), dtype, expected.data(), dtype, count, 0.125f});
      machine->scale({data, dtype, data, dtype, count, 0.125f});
      machine->synchronize();
      expect_same(*machine, dtype, data, expected.data(), count, "in place");
    }
}

/// Tensors of every size from 0, one after the other at multiples of `align` elements, packed and unpacked.
void compare_copy_list(Machine& machine, DType to, DType from, std::size_t align, std::size_t tensors) {
  std::mt19937_64 random(7);
  std::vector<std::size_t> sizes;
  std::size_t total = 0;
  for (std::size_t t = 0; t < tensors; ++t) {
    sizes.push_back(t % 7 == 0 ? 0 : t % 50 == 49 ? 9000 + t : random() % 70);
    total += (sizes.back() + align - 1) / align * align;
  }
  const std::size_t stride = (total * 8 + 4096) / 256 * 256, list_nbytes = tensors * sizeof(device::CopyItem);
  std::byte* in = machine.memory(2 * stride + list_nbytes);
  std::byte* out = in + stride;
  test::fill(from, in, total + 1, random);
  std::memset(out, 0x5a, stride);
  std::vector<device::CopyItem> items;
  for (std::size_t t = 0, at = 0; t < tensors; ++t) {  // the tensors are in reverse order in `in`
    const std::size_t room = (sizes[t] + align - 1) / align * align;
    items.push_back({out + at * size_of(to), in + (total - at - room) * size_of(from), sizes[t]});
    at += room;
  }
  device::number_chunks(items);
  auto* on_device = reinterpret_cast<device::CopyItem*>(in + 2 * stride);
  std::memcpy(on_device, items.data(), list_nbytes);
  std::vector<std::byte> expected(stride, std::byte{0x5a});
  for (const device::CopyItem& item : items) {
    std::byte* dst = expected.data() + (static_cast<std::byte*>(item.dst) - out);
    if (to == from) {
      std::memcpy(dst, item.src, item.count * size_of(to));
    } else {
      device::cast(dst, to, item.src, from, item.count);
    }
  }
  machine.copy_list({items, on_device, to, from});
  machine.synchronize();
  if (std::memcmp(out, expected.data(), stride) != 0)
    test::fail(__FILE__, __LINE__,
               text(machine.name(), ": copy_list ", name_of(from), "->", name_of(to), " align ", align));
}

TEST(machines, copy_list_packs_and_casts) {
  for (const auto& machine : test::machines()) {
    for (const DType dtype : kAll)
      for (const std::size_t align : {1u, 16u}) compare_copy_list(*machine, dtype, dtype, align, 120);
    for (const DType from : kScaled)
      for (const DType to : kScaled)
        if (to != from)
          for (const std::size_t align : {1u, 64u}) compare_copy_list(*machine, to, from, align, 120);
    compare_copy_list(*machine, DType::bfloat16, DType::float32, 64, 3000);
  }
}

std::uint64_t checksum_on(Machine& machine, std::size_t begin, std::size_t nbytes) {
  std::byte* memory = machine.memory(1 << 17);
  auto* sum = reinterpret_cast<std::uint64_t*>(memory);
  *sum = 5;
  machine.checksum({sum, memory + 64 + begin, nbytes});
  machine.synchronize();
  return *sum - 5;
}

TEST(machines, checksum_is_that_of_the_host) {
  for (const auto& machine : test::machines()) {
    std::mt19937_64 random(3);
    std::byte* data = machine->memory(1 << 17) + 64;
    test::fill(DType::int64, data, 10000, random);
    for (const std::size_t begin : {0u, 2u, 8u})
      for (const std::size_t nbytes : {1u, 2u, 8u, 14u, 64u, 2046u, 4096u, 65550u}) {
        std::uint64_t expected = 0;
        device::checksum({&expected, data + begin, nbytes});
        EXPECT_EQ(checksum_on(*machine, begin, nbytes), expected);
      }
  }
}

TEST(machines, checksum_finds_what_a_plain_sum_does_not) {
  float x[1000] = {};
  for (int i = 0; i < 1000; ++i) x[i] = static_cast<float>(i % 7) - 3.0f;
  const auto sum = [&x] {
    std::uint64_t found = 0;
    device::checksum({&found, x, sizeof(x)});
    return found;
  };
  const std::uint64_t before = sum();
  std::swap(x[0], x[1]);
  EXPECT_TRUE(sum() != before);  // it depends on the order within a word
  std::swap(x[0], x[1]);
  EXPECT_EQ(sum(), before);
  std::swap(x[10], x[900]);
  EXPECT_TRUE(sum() != before);
  std::swap(x[10], x[900]);
  for (float& each : x) each = -each;
  EXPECT_TRUE(sum() != before);
  for (float& each : x) each = 0.0f;
  const std::uint64_t zeros = sum();
  x[999] = -0.0f;
  EXPECT_TRUE(sum() != zeros);
}

TEST(machines, arguments_are_checked) {
  float x = 0;
  EXPECT_THROW_WITH(device::check_scale({&x, DType::float64, &x, DType::float32, 1, 1.0f}), InvalidArgument,
                    "to float64");
  EXPECT_THROW_WITH(device::check_scale({nullptr, DType::float32, &x, DType::float32, 1, 1.0f}), InvalidArgument,
                    "dst is null");
  device::CopyItem items[] = {{&x, &x, 5000}, {&x, nullptr, 1}};
  EXPECT_EQ(device::number_chunks(items), 3u);
  EXPECT_THROW_WITH(device::check_copy_list({items, items, DType::float32, DType::float32}), InvalidArgument,
                    "src of item 1");
  items[1].src = &x;
  device::check_copy_list({items, items, DType::float32, DType::float32});
  EXPECT_THROW_WITH(device::check_copy_list({items, items, DType::float32, DType::int32}), InvalidArgument,
                    "to float32");
  EXPECT_THROW_WITH(device::check_copy_list({items, nullptr, DType::float32, DType::float32}), InvalidArgument,
                    "on_device");
  EXPECT_THROW_WITH(device::check_checksum({nullptr, &x, 4}), InvalidArgument, "sum is null");
  std::uint64_t sum = 0;
  EXPECT_THROW_WITH(device::check_checksum({&sum, nullptr, 4}), InvalidArgument, "data is null, nbytes 4");
  items[1].first_chunk = 1;
  EXPECT_THROW_WITH(device::check_copy_list({items, items, DType::float32, DType::float32}), InvalidArgument,
                    "not at 2");
}

}  // namespace
}  // namespace zcomm
