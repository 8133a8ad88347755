// Checks arguments, then calls the table of the current instruction set.
#include "device/kernels.hpp"

#include <unistd.h>

#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "base/float_mode.hpp"
#include "device/cpu/kernels_table.hpp"
#include "device/in_parts.hpp"
#include "device/kernels_check.hpp"
#include "device/stream_kernels.hpp"

namespace zcomm::device {

namespace plain {
extern const KernelTable kKernels;
}
#if defined(__x86_64__)  // only here is it known which tables a target has; cmake drops the other files
namespace avx2 {
extern const KernelTable kKernels;
}
namespace avx512 {
extern const KernelTable kKernels;
}
namespace avx512_bf16 {
extern const KernelTable kKernels;
}
#endif

const KernelTable& kernel_table(Isa isa) {
  if (isa > best_isa())
    throw Unsupported(text("this CPU has no ", name_of(isa), "; its best is ", name_of(best_isa())));
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2:
      return avx2::kKernels;
    case Isa::avx512:
      return avx512::kKernels;
    case Isa::avx512_bf16:
      return avx512_bf16::kKernels;
#endif
    default:
      return plain::kKernels;
  }
}

namespace {

const KernelTable& current_table() {
  static const KernelTable& table = kernel_table(current_isa());
  return table;
}

/// From half the second-level cache up, storing through the cache evicts more than it saves.
std::size_t streaming_nbytes() {
  static const std::size_t nbytes = [] {
    const long l2 = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
    return static_cast<std::size_t>(l2 > 0 ? l2 : 1 << 20) / 2;
  }();
  return nbytes;
}

bool in_place(const Reduce& args) {
  for (const void* dst : args.dst)
    for (const void* src : args.src)
      if (dst == src) return true;
  return false;
}

}  // namespace

bool wants_streaming(Stores stores, std::size_t nbytes) {
  return stores == Stores::streaming || (stores == Stores::automatic && nbytes >= streaming_nbytes());
}

void check_reduce(const Reduce& args) {
  if (args.dst.empty() || args.src.empty())
    throw InvalidArgument(
        text("reduce: needs at least one dst and one src, got ", args.dst.size(), " and ", args.src.size()));
  const bool half = args.in == DType::float16 || args.in == DType::bfloat16;
  if (args.out != args.in && !(half && args.out == DType::float32))
    throw InvalidArgument(text("reduce: out ", name_of(args.out), " does not go with in ", name_of(args.in),
                               "; use the same type, or float32 for float16 and bfloat16"));
  if (args.op == ReduceOp::avg && !is_floating(args.in))
    throw InvalidArgument(text("reduce: avg of ", name_of(args.in), " is not defined; use sum"));
  if (args.count == 0) return;
  for (std::size_t d = 0; d < args.dst.size(); ++d)
    if (args.dst[d] == nullptr) throw InvalidArgument(text("reduce: dst[", d, "] is null, count ", args.count));
  for (std::size_t s = 0; s < args.src.size(); ++s)
    if (args.src[s] == nullptr) throw InvalidArgument(text("reduce: src[", s, "] is null, count ", args.count));
}

void check_device_reduce(const Reduce& args) {
  check_reduce(args);
  if (args.dst.size() > kMaxKernelBuffers || args.src.size() > kMaxKernelBuffers)
    throw InvalidArgument(text("reduce on a device: ", args.dst.size(), " dst and ", args.src.size(),
                               " src; expected at most ", kMaxKernelBuffers, " of each"));
}

void check_pointers(const char* what, const void* dst, const void* src, std::size_t nbytes) {
  if (nbytes != 0 && (dst == nullptr || src == nullptr))
    throw InvalidArgument(text(what, ": ", dst == nullptr ? "dst" : "src", " is null, nbytes ", nbytes));
}

void check_cast(const void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) {
  if (!is_floating(dst_dtype) || !is_floating(src_dtype))
    throw InvalidArgument(text("cast: from ", name_of(src_dtype), " to ", name_of(dst_dtype),
                               " is not served; both must be float32, float64, float16 or bfloat16"));
  if (count > 0 && (dst == nullptr || src == nullptr))
    throw InvalidArgument(text("cast: ", dst == nullptr ? "dst" : "src", " is null, count ", count));
}

void reduce(const Reduce& args) {
  check_reduce(args);
  if (args.count == 0) return;
  const bool streaming =
      !args.accumulate && wants_streaming(args.stores, args.count * size_of(args.out)) && !in_place(args);
  const DefaultFloatMode mode;
  current_table().reduce({args.dst.data(), args.dst.size(), args.src.data(), args.src.size(), args.count, args.in,
                          args.out, args.op, args.accumulate, streaming});
}

void reduce_in_parts(const Reduce& args) {
  const std::size_t element_nbytes = size_of(args.in) * args.src.size() + size_of(args.out) * args.dst.size();
  if (args.count < least_part_count(element_nbytes)) return reduce(args);
  check_reduce(args);
  Reduce whole = args;
  whole.stores = wants_streaming(args.stores, args.count * size_of(args.out)) ? Stores::streaming : Stores::cached;
  in_parts(args.count, element_nbytes, [&whole](std::size_t begin, std::size_t end) {
    std::vector<void*> dst(whole.dst.begin(), whole.dst.end());
    std::vector<const void*> src(whole.src.begin(), whole.src.end());
    for (void*& each : dst) each = static_cast<std::byte*>(each) + begin * size_of(whole.out);
    for (const void*& each : src) each = static_cast<const std::byte*>(each) + begin * size_of(whole.in);
    Reduce part = whole;
    part.dst = dst, part.src = src, part.count = end - begin;
    reduce(part);
  });
}

void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) {
  check_cast(dst, dst_dtype, src, src_dtype, count);
  if (count == 0) return;
  if (dst_dtype == src_dtype) return copy(dst, src, count * size_of(dst_dtype));
  const DefaultFloatMode mode;
  current_table().cast(dst, dst_dtype, src, src_dtype, count);
}

void copy(void* dst, const void* src, std::size_t nbytes, Stores stores) {
  if (nbytes == 0 || dst == src) return;
  if (dst == nullptr || src == nullptr)
    throw InvalidArgument(text("copy: ", dst == nullptr ? "dst" : "src", " is null, nbytes ", nbytes));
  if (wants_streaming(stores, nbytes)) return current_table().stream(dst, src, nbytes);
  std::memcpy(dst, src, nbytes);
}

}  // namespace zcomm::device
