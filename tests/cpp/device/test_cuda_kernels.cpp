// CUDA kernels against the host's, to the bit, in page-locked memory that both address. Passes idly without a device.
#include <memory>
#include <new>

#include "base/error.hpp"
#include "device/cuda.hpp"
#include "device/reference.hpp"
#include "test.hpp"

namespace zcomm {
namespace {

namespace cuda = device::cuda;

class Locked {
 public:
  explicit Locked(std::size_t nbytes) : data_(static_cast<std::byte*>(::operator new(nbytes, kAlign))) {
    EXPECT_TRUE(cuda::page_lock(data_, nbytes));
  }
  ~Locked() {
    cuda::page_unlock(data_);
    ::operator delete(data_, kAlign);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  std::byte* data() { return data_; }

 private:
  static constexpr std::align_val_t kAlign{4096};
  std::byte* data_;
};

constexpr std::size_t kMost = 5000;  // elements
const DType kAll[] = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8,
                      DType::u8,  DType::i32, DType::i64, DType::b8};

void compare_reduce(cuda::Stream& stream, Locked& memory, DType in, DType out, ReduceOp op, std::size_t sources,
                    std::size_t count, std::size_t shift, bool accumulate) {
  std::mt19937_64 random(count + sources);
  std::vector<const void*> src;
  for (std::size_t s = 0; s < sources; ++s) {
    std::byte* data = memory.data() + s * kMost * 8 + shift * size_of(in);
    test::fill(in, data, count, random);
    src.push_back(data);
  }
  std::byte* result = memory.data() + 6 * kMost * 8 + shift * size_of(out);
  test::fill(out, result, count, random);
  std::vector<std::byte> expected(result, result + count * size_of(out));
  void* const device_dst[] = {result};
  void* const host_dst[] = {expected.data()};
  device::reduce({host_dst, src, count, in, out, op, accumulate});
  stream.reduce({device_dst, src, count, in, out, op, accumulate});
  stream.synchronize();
  for (std::size_t i = 0; i < count; ++i)
    if (!test::same_element(out, result, expected.data(), i))
      return test::fail(__FILE__, __LINE__,
                        text(name_of(in), "->", name_of(out), " ", name_of(op), " sources ", sources, " count ", count,
                             " shift ", shift, accumulate ? " accumulate" : "", ": element ", i));
}

TEST(cuda_kernels, reduce_equals_the_host) {
  if (!cuda::available()) return;
  cuda::Stream stream(0);
  Locked memory(7 * kMost * 8);
  for (const DType in : kAll)
    for (const DType out : {in, DType::f32}) {
      if (out != in && in != DType::f16 && in != DType::bf16) continue;
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod}) {
        if (op == ReduceOp::avg && !is_floating(in)) continue;
        for (const std::size_t sources : {1u, 2u, 3u, 5u})
          for (const std::size_t count : {1u, 7u, 64u, 1000u, 4097u})
            for (const std::size_t shift : {0u, 1u})
              for (const bool accumulate : {false, true})
                compare_reduce(stream, memory, in, out, op, sources, count, shift, accumulate);
      }
    }
}

TEST(cuda_kernels, cast_equals_the_host) {
  if (!cuda::available()) return;
  const std::size_t count = 65536 * 2;
  cuda::Stream stream(0);
  Locked in(count * 8), out(count * 8);
  std::mt19937_64 random(1);
  const DType floats[] = {DType::f32, DType::f64, DType::f16, DType::bf16};
  for (const DType from : floats)
    for (const DType to : floats) {
      for (std::size_t i = 0; i < count; ++i) {  // all 16-bit values; else all kinds of bits
        if (size_of(from) == 2) test::put(in.data(), i, static_cast<std::uint16_t>(i));
        if (from == DType::f32) test::put(in.data(), i, static_cast<std::uint32_t>(random()));
        if (from == DType::f64)
          test::put_real(from, in.data(), i, std::bit_cast<float>(static_cast<std::uint32_t>(random())) * (1 + 1e-9));
      }
      std::vector<std::byte> expected(count * 8);
      device::cast(expected.data(), to, in.data(), from, count);
      stream.cast(out.data(), to, in.data(), from, count);
      stream.synchronize();
      EXPECT_EQ(std::memcmp(expected.data(), out.data(), count * size_of(to)), 0);
    }
}

TEST(cuda_kernels, streams_copy_and_events_order) {
  if (!cuda::available()) return;
  Locked memory(1 << 20);
  cuda::Stream first(0), second(0);
  cuda::Event event(0);
  std::byte* data = memory.data();
  for (std::size_t i = 0; i < 1000; ++i) data[i] = static_cast<std::byte>(i);
  first.copy(data + 4096, data, 1000);
  event.record(first);
  event.wait(second);
  second.copy(data + 8192, data + 4096, 1000);
  second.synchronize();
  EXPECT_TRUE(event.done());
  EXPECT_EQ(std::memcmp(data, data + 8192, 1000), 0);
  cuda::Stream moved(std::move(first));
  moved.synchronize();
}

TEST(cuda_kernels, refuses_too_many_buffers) {
  if (!cuda::available()) return;
  cuda::Stream stream(0);
  std::vector<const void*> src(9, &stream);
  void* const dst[] = {&stream};
  EXPECT_THROW_WITH(stream.reduce({dst, src, 1, DType::f32, DType::f32, ReduceOp::sum}), InvalidArgument, "9 src");
}

}  // namespace
}  // namespace zcomm
