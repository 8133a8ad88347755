// Element types and reductions that the core moves and reduces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zcomm {

enum class DType : std::uint8_t { f32, f64, f16, bf16, i8, u8, i32, i64, b8 };

enum class ReduceOp : std::uint8_t { sum, avg, min, max, prod };

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i8:
    case DType::u8:
    case DType::b8:
      return 1;
  }
  return 0;
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::f16 || dtype == DType::bf16;
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
