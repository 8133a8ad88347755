// scale in blocks that stay in L1, between the conversions of the current instruction set.
#include "device/scale.hpp"

#include <algorithm>
#include <bit>

#include "base/error.hpp"
#include "device/kernels.hpp"

namespace zcomm::device {
namespace {

constexpr std::size_t kBlock = 1024;

bool is_served(DType dtype) { return dtype == DType::float32 || dtype == DType::bfloat16 || dtype == DType::float16; }

template <class Bits>
std::uint64_t count_nonfinite(const void* data, Bits infinity, std::size_t count) {
  const auto* bits = static_cast<const Bits*>(data);
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found += (bits[i] & infinity) == infinity ? 1 : 0;
  return found;
}

std::uint64_t count_nonfinite(const void* data, DType dtype, std::size_t count) {
  if (dtype == DType::float32) return count_nonfinite<std::uint32_t>(data, 0x7f800000u, count);
  return count_nonfinite<std::uint16_t>(data, dtype == DType::bfloat16 ? 0x7f80 : 0x7c00, count);
}

}  // namespace

void check_scale(const Scale& args) {
  if (!is_served(args.dst_dtype) || !is_served(args.src_dtype))
    throw InvalidArgument(text("scale: from ", name_of(args.src_dtype), " to ", name_of(args.dst_dtype),
                               " is not served; both must be float32, bfloat16 or float16"));
  if (args.count > 0 && (args.dst == nullptr || args.src == nullptr))
    throw InvalidArgument(text("scale: ", args.dst == nullptr ? "dst" : "src", " is null, count ", args.count));
}

void scale(const Scale& args) {
  check_scale(args);
  const float factor = args.more == nullptr ? args.factor : args.factor * *args.more;
  const auto* src = static_cast<const std::byte*>(args.src);
  auto* dst = static_cast<std::byte*>(args.dst);
  std::uint64_t nonfinite = 0;
  float wide[kBlock];
  for (std::size_t i = 0; i < args.count; i += kBlock) {
    const std::size_t n = std::min(kBlock, args.count - i);
    std::byte* to = dst + i * size_of(args.dst_dtype);
    cast(wide, DType::float32, src + i * size_of(args.src_dtype), args.src_dtype, n);
    for (std::size_t k = 0; k < n; ++k) wide[k] = wide[k] * factor;
    cast(to, args.dst_dtype, wide, DType::float32, n);
    if (args.nonfinite != nullptr) nonfinite += count_nonfinite(to, args.dst_dtype, n);
  }
  if (args.nonfinite != nullptr) *args.nonfinite += nonfinite;
}

}  // namespace zcomm::device
