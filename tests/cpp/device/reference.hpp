// Slow, plain reference arithmetic for the kernels: written apart from them, by the definition of the formats.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/cpu_features.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm::test {

inline std::vector<Isa> isas() {
  std::vector<Isa> all;
  for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512, Isa::avx512_bf16})
    if (isa <= best_isa()) all.push_back(isa);
  return all;
}

/// A 16-bit format: 1 sign bit, the rest exponent, `fraction` bits.
struct Half {
  int fraction, bias;
};
inline constexpr Half kBf16{7, 127}, kF16{10, 15};

inline double decode(Half format, std::uint16_t bits) {
  const int exponent = (bits & 0x7fff) >> format.fraction, top = 0x7fff >> format.fraction;
  const double fraction = bits & ((1 << format.fraction) - 1), sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == top)
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  const double hidden = exponent == 0 ? 0.0 : std::ldexp(1.0, format.fraction);
  return sign * std::ldexp(hidden + fraction, std::max(exponent, 1) - format.bias - format.fraction);
}

/// Rounds to nearest even by dividing by the last place; NaN: any quiet NaN (callers compare NaN as NaN).
inline std::uint16_t encode(Half format, double x) {
  const int sign = std::signbit(x) ? 0x8000 : 0, infinity = (0x7fff >> format.fraction) << format.fraction;
  if (std::isnan(x)) return static_cast<std::uint16_t>(sign | infinity | 1 << (format.fraction - 1));
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | infinity);
  if (x == 0) return static_cast<std::uint16_t>(sign);
  const int exponent = std::max(std::ilogb(x), 1 - format.bias);
  const auto units = static_cast<std::int64_t>(std::nearbyint(std::ldexp(std::fabs(x), format.fraction - exponent)));
  // A carry out of the fraction raises the exponent.
  const std::int64_t bits = units + ((std::int64_t{exponent} + format.bias - 1) << format.fraction);
  return static_cast<std::uint16_t>(sign | std::min<std::int64_t>(bits, infinity));
}

inline bool is_nan(Half format, std::uint16_t bits) { return std::isnan(decode(format, bits)); }

template <class T>
T get(const std::byte* data, std::size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void put(std::byte* data, std::size_t index, T value) {
  std::memcpy(data + index * sizeof(T), &value, sizeof(T));
}

inline double get_real(DType dtype, const std::byte* data, std::size_t i) {
  switch (dtype) {
    case DType::float64:
      return get<double>(data, i);
    case DType::float32:
      return static_cast<double>(get<float>(data, i));
    case DType::bfloat16:
      return decode(kBf16, get<std::uint16_t>(data, i));
    default:
      return decode(kF16, get<std::uint16_t>(data, i));
  }
}
inline void put_real(DType dtype, std::byte* data, std::size_t i, double x) {
  switch (dtype) {
    case DType::float64:
      return put(data, i, x);
    case DType::float32:
      return put(data, i, static_cast<float>(x));
    case DType::bfloat16:
      return put(data, i, encode(kBf16, x));
    default:
      return put(data, i, encode(kF16, x));
  }
}

inline std::int64_t get_whole(DType dtype, const std::byte* data, std::size_t i) {
  switch (dtype) {
    case DType::int8:
      return get<std::int8_t>(data, i);
    case DType::uint8:
      return get<std::uint8_t>(data, i);
    case DType::int32:
      return get<std::int32_t>(data, i);
    case DType::int64:
      return get<std::int64_t>(data, i);
    default:
      return get<std::uint8_t>(data, i) != 0;
  }
}
inline void put_whole(DType dtype, std::byte* data, std::size_t i, std::int64_t x) {
  switch (dtype) {
    case DType::int8:
      return put(data, i, static_cast<std::int8_t>(x));
    case DType::uint8:
      return put(data, i, static_cast<std::uint8_t>(x));
    case DType::int32:
      return put(data, i, static_cast<std::int32_t>(x));
    case DType::int64:
      return put(data, i, x);
    default:
      return put(data, i, static_cast<std::uint8_t>(x != 0));
  }
}

/// Random elements; floats include zeros of both signs, subnormals, infinities and NaN now and then.
inline void fill(DType dtype, std::byte* data, std::size_t count, std::mt19937_64& random) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t bits = random();
    if (!is_floating(dtype)) {
      put_whole(dtype, data, i,
                dtype == DType::boolean ? static_cast<std::int64_t>(bits >> 63) : static_cast<std::int64_t>(bits));
      continue;
    }
    const double specials[] = {0.0,     -0.0, std::numeric_limits<double>::infinity(), -1e-40, 3e-7,
                               65504.0, 3e38, std::numeric_limits<double>::quiet_NaN()};
    const double normal =
        std::ldexp(static_cast<double>(static_cast<std::int64_t>(bits)), -63 + static_cast<int>(bits % 7));
    put_real(dtype, data, i, bits % 31 == 0 ? specials[bits / 31 % 8] : normal);
  }
}

/// Equal bits; any NaN equals any NaN.
inline bool same_element(DType dtype, const std::byte* a, const std::byte* b, std::size_t i) {
  if (std::memcmp(a + i * size_of(dtype), b + i * size_of(dtype), size_of(dtype)) == 0) return true;
  return is_floating(dtype) && std::isnan(get_real(dtype, a, i)) && std::isnan(get_real(dtype, b, i));
}

}  // namespace zcomm::test
