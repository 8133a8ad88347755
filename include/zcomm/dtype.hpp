// Element types and reductions that the core supports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zcomm {

/// Named as in Python; `boolean` is torch.bool, one byte.
enum class DType : std::uint8_t { float32, float64, float16, bfloat16, int8, uint8, int32, int64, boolean };

enum class ReduceOp : std::uint8_t { sum, avg, min, max, prod };

/// The order in which a reduction adds. any: the fastest for its size; between hosts the bits may then depend on the
/// size and on the other tensors of the call. rank: in rank order (on several hosts: within each host, then in order of
/// the hosts), so that each element's bits depend only on the ranks' elements.
enum class ReduceOrder : std::uint8_t { any, rank };

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::int8:
    case DType::uint8:
    case DType::boolean:
      return 1;
  }
  return 0;
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float64 || dtype == DType::float16 || dtype == DType::bfloat16;
}

/// PyTorch's short name ("float32", "bfloat16", ...).
constexpr std::string_view name_of(DType dtype) {
  constexpr std::string_view names[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                        "uint8",   "int32",   "int64",   "bool"};
  return names[static_cast<int>(dtype)];
}

constexpr std::string_view name_of(ReduceOp op) {
  constexpr std::string_view names[] = {"sum", "avg", "min", "max", "prod"};
  return names[static_cast<int>(op)];
}

}  // namespace zcomm
