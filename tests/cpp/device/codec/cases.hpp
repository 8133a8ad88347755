// Codecs, buffers and numbers for the tests of device/codec.hpp.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "device/codec.hpp"
#include "device/codec_layout.hpp"
#include "device/cpu/codec_table.hpp"
#include "device/reference.hpp"
#include "test.hpp"

namespace zcomm::test {

inline constexpr Codec kInt8{}, kInt4{.bits = 4}, kFp8{.kind = CodecKind::fp8_e4m3},
    kSign{.kind = CodecKind::sign, .bits = 1};

inline std::string show(const Codec& codec) {
  const char* kinds[] = {"block_int ", "fp8_e4m3 ", "sign "};
  return text(kinds[static_cast<int>(codec.kind)], codec.bits, codec.rotate != 0 ? " rotate" : "",
              codec.stochastic ? " stochastic" : "");
}

/// The value of the highest code.
inline float top_of(const Codec& codec) {
  return codec.kind == CodecKind::fp8_e4m3 ? 448.0f : codec.bits == 4 ? 7.0f : 127.0f;
}

/// Bytes at a multiple of 64, with 64 more behind them that no call may change.
class Room {
 public:
  explicit Room(std::size_t nbytes) : nbytes_(nbytes), memory_(nbytes + 2 * kGuard, std::byte{0x5a}) {
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
    begin_ = (kGuard - at % kGuard) % kGuard;
  }
  Room(const Room& other) : Room(other.nbytes_) { std::memcpy(data(), other.data(), nbytes_ + kGuard); }
  Room& operator=(const Room&) = delete;
  std::byte* data() { return memory_.data() + begin_; }
  const std::byte* data() const { return memory_.data() + begin_; }
  std::size_t nbytes() const { return nbytes_; }
  bool guarded() const {
    for (std::size_t i = 0; i < kGuard; ++i)
      if (data()[nbytes_ + i] != std::byte{0x5a}) return false;
    return true;
  }
  void zero() { std::memset(data(), 0, nbytes_); }

 private:
  static constexpr std::size_t kGuard = 64;
  std::size_t nbytes_, begin_ = 0;
  std::vector<std::byte> memory_;
};

inline std::vector<float> decoded(const Codec& codec, const std::byte* data, std::size_t count,
                                  const std::uint8_t* mask = nullptr) {
  std::vector<float> out(count, -1.0f);
  device::decode_sum(codec, {.out = out.data(), .in = {&data, 1}, .count = count, .mask = mask});
  return out;
}

inline std::uint16_t scale_bits(const std::byte* data, std::size_t block) { return get<std::uint16_t>(data, block); }
inline float scale_of(const std::byte* data, std::size_t block) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(scale_bits(data, block)) << 16);
}

inline float largest_of(const float* values, std::size_t n) {
  float largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(values[i]));
  return largest;
}

/// The smallest bf16 number that is not below x.
inline float up_to_bf16(float x) {
  std::uint16_t bits = test::encode(test::kBf16, static_cast<double>(x));
  if (test::decode(test::kBf16, bits) < static_cast<double>(x)) ++bits;
  return static_cast<float>(test::decode(test::kBf16, bits));
}

inline double e4m3(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  return std::ldexp(exponent == 0 ? fraction : fraction + 8, std::max(exponent, 1) - 10);
}

/// Finite numbers, each block of its own magnitude, down to subnormals and up to 2^126; quotients near halves of
/// integers for a codec with this top; zeros of both signs.
inline std::vector<float> hard_numbers(std::size_t count, float top, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> all(count);
  const auto unit = [&random] { return std::ldexp(static_cast<float>(random() >> 40), -24); };
  for (std::size_t begin = 0; begin < count; begin += kCodecBlock) {
    const float largest = std::ldexp(1.0f + unit(), static_cast<int>(random() % 276) - 150);
    const float step = up_to_bf16(std::max(largest / top, 0x1p-118f));
    for (std::size_t i = begin; i < std::min(count, begin + kCodecBlock); ++i) {
      const float sign = random() % 2 == 0 ? 1.0f : -1.0f;
      float x = unit() * largest;
      if (random() % 4 == 0) x = (std::floor(unit() * (top - 1)) + 0.5f) * step;
      if (random() % 8 == 0) x = std::nextafter(x, random() % 2 == 0 ? 0.0f : largest);
      if (random() % 16 == 0) x *= 1e-6f;
      if (random() % 16 == 0) x = 0.0f;
      if (random() % 64 == 0) x = std::numeric_limits<float>::denorm_min() * static_cast<float>(random() % 5);
      all[i] = sign * (i == begin ? largest : std::min(x, largest));
    }
  }
  return all;
}

/// Counts around the sizes of rotations, of half and whole blocks.
inline std::vector<std::size_t> awkward_counts() {
  std::vector<std::size_t> all;
  for (std::size_t n = 1; n <= 34; ++n) all.push_back(n);
  for (const std::size_t n : {63u, 64u, 95u, 127u, 128u, 129u, 160u, 161u, 255u, 256u, 257u, 300u, 511u, 512u, 513u,
                              769u, 1000u, 2048u, 4099u})
    all.push_back(n);
  return all;
}

/// The largest residue of block_int, as a share of the block's largest.
inline double block_int_bound(int bits) { return (bits == 4 ? 1.0 / 14 : 1.0 / 254) * (1 + 0x1p-7); }

}  // namespace zcomm::test
