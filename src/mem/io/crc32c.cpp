// crc32c: eight tables ("slicing by 8"), or three interleaved streams of the SSE4.2 instruction; crc32c_fold.cpp has
// the faster kernels for CPUs with a carry-less multiplier of more than 128 bits. (One of 128 bits is no faster.)
//
// The instruction has a latency of 3 cycles and a throughput of 1, so three independent streams keep it busy; their
// states are joined by shifting them over kLane zero bytes, which is linear over GF(2) and thus a table look-up.
// Source: Kounavis & Berry 2005 (slicing); Gopal et al., Intel 2011 (interleaving).
#include "mem/io/crc32c.hpp"

#include <array>
#include <cstring>

#include "base/cpu_features.hpp"
#include "mem/io/crc32c_kernels.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace zcomm::mem {
namespace {

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t value = 0; value < 256; ++value) {
    std::uint32_t crc = value;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? kCrc32cPolynomial : 0u);
    tables[0][value] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t value = 0; value < 256; ++value)
      tables[k][value] = (tables[k - 1][value] >> 8) ^ tables[0][tables[k - 1][value] & 0xFFu];
  return tables;
}

constexpr Tables kTables = make_tables();

constexpr std::uint32_t step(std::uint32_t crc, std::uint32_t byte) {
  return (crc >> 8) ^ kTables[0][(crc ^ byte) & 0xFFu];
}

#if defined(__x86_64__)
constexpr std::size_t kLane = 4096;  // bytes per stream; a power of two
using Columns = std::array<std::uint32_t, 32>;

constexpr std::uint32_t applied(const Columns& columns, std::uint32_t value) {
  std::uint32_t result = 0;
  for (std::size_t bit = 0; bit < 32; ++bit)
    if ((value >> bit) & 1u) result ^= columns[bit];
  return result;
}

using Shift = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr Shift make_shift() {
  Columns columns{};  // the operator "one zero byte", then squared until it is "kLane zero bytes"
  for (std::size_t bit = 0; bit < 32; ++bit) columns[bit] = step(1u << bit, 0);
  for (std::size_t length = 1; length < kLane; length *= 2) {
    Columns squared{};
    for (std::size_t bit = 0; bit < 32; ++bit) squared[bit] = applied(columns, columns[bit]);
    columns = squared;
  }
  Shift shift{};
  for (std::size_t k = 0; k < 4; ++k)
    for (std::uint32_t value = 0; value < 256; ++value) shift[k][value] = applied(columns, value << (8 * k));
  return shift;
}

constexpr Shift kShift = make_shift();

std::uint64_t over_lane(std::uint64_t crc) {
  return kShift[0][crc & 0xFFu] ^ kShift[1][(crc >> 8) & 0xFFu] ^ kShift[2][(crc >> 16) & 0xFFu] ^
         kShift[3][(crc >> 24) & 0xFFu];
}

std::uint64_t load(const std::byte* data) {
  std::uint64_t word;
  std::memcpy(&word, data, 8);
  return word;
}

#endif

}  // namespace

std::uint32_t crc32c_tables(std::uint32_t crc, const std::byte* data, std::size_t nbytes) {
  for (; nbytes >= 8; nbytes -= 8, data += 8) {
    std::uint32_t word[2];
    std::memcpy(word, data, 8);
    if constexpr (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__) {
      word[0] = __builtin_bswap32(word[0]);
      word[1] = __builtin_bswap32(word[1]);
    }
    word[0] ^= crc;
    crc = 0;
    for (std::size_t k = 0; k < 4; ++k) {
      crc ^= kTables[7 - k][(word[0] >> (8 * k)) & 0xFFu];
      crc ^= kTables[3 - k][(word[1] >> (8 * k)) & 0xFFu];
    }
  }
  for (; nbytes > 0; --nbytes, ++data) crc = step(crc, static_cast<std::uint32_t>(*data));
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_instruction(std::uint32_t crc, const std::byte* data,
                                                                   std::size_t nbytes) {
  std::uint64_t a = crc;
  for (; nbytes >= 3 * kLane; nbytes -= 3 * kLane, data += 3 * kLane) {
    std::uint64_t b = 0, c = 0;
    for (std::size_t i = 0; i < kLane; i += 8) {
      a = _mm_crc32_u64(a, load(data + i));
      b = _mm_crc32_u64(b, load(data + kLane + i));
      c = _mm_crc32_u64(c, load(data + 2 * kLane + i));
    }
    a = over_lane(over_lane(a) ^ b) ^ c;
  }
  for (; nbytes >= 8; nbytes -= 8, data += 8) a = _mm_crc32_u64(a, load(data));
  auto low = static_cast<std::uint32_t>(a);
  for (; nbytes > 0; --nbytes, ++data) low = _mm_crc32_u8(low, static_cast<unsigned char>(*data));
  return low;
}
#endif

const Crc32cKernels& crc32c_kernels() {
#if defined(__x86_64__)
  static const bool instruction = __builtin_cpu_supports("sse4.2");
  static const bool fold = instruction && current_isa() >= Isa::avx2 && __builtin_cpu_supports("pclmul") &&
                           __builtin_cpu_supports("vpclmulqdq");
  static const Crc32cKernels kernels{{{"tables", crc32c_tables, true},
                                      {"instruction", crc32c_instruction, instruction},
                                      {"fold_256", crc32c_fold_256, fold},
                                      {"fold_512", crc32c_fold_512, fold && current_isa() >= Isa::avx512}}};
#else
  static constexpr Crc32cKernels kernels{{{"tables", crc32c_tables, true}, {}, {}, {}}};
#endif
  return kernels;
}

std::uint32_t crc32c_plain(const std::byte* data, std::size_t nbytes) { return ~crc32c_tables(~0u, data, nbytes); }

std::uint32_t crc32c(const std::byte* data, std::size_t nbytes) {
  static const Crc32cKernel fastest = [] {
    Crc32cKernel last = crc32c_tables;
    for (const NamedCrc32c& each : crc32c_kernels().at)
      if (each.here) last = each.kernel;
    return last;
  }();
  return ~fastest(~0u, data, nbytes);
}

}  // namespace zcomm::mem
