// crc32c by carry-less multiplication: 256 (AVX-512) or 128 bytes (AVX2) of one message at a time.
//
// A message is a polynomial over GF(2), its crc the remainder by P. Each accumulator of 128 bits is congruent to the
// bytes so far: to advance by D bits, a.low * (x^(D+32) mod P) + a.high * (x^(D-32) mod P) replaces a, and the next
// bytes are added. Several accumulators in flight hide the multiplier's latency. The remaining 16 bytes, congruent to
// the whole message, and any tail go through the CPU's crc32 instruction. Numbers are bit-reflected, as the polynomial
// is: the first bit of a byte is its highest power, x^0 is the top bit. Thread rule: pure functions. Source: Gopal et
// al., "Fast CRC computation using PCLMULQDQ", Intel 2009.
#include "mem/io/crc32c_kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

namespace zcomm::mem {
namespace {

/// x^power mod P, reflected, and shifted by one since a product of reflected numbers is one bit short.
constexpr long long power_of_x(int power) {
  std::uint32_t value = 0x80000000u;
  for (; power > 0; --power) value = (value >> 1) ^ ((value & 1u) ? kCrc32cPolynomial : 0u);
  return static_cast<long long>(std::uint64_t{value} << 1);
}

/// Factors that advance 128 bits by `nbytes`.
struct Factors {
  long long low, high;
};
constexpr Factors over(int nbytes) { return {power_of_x(8 * nbytes + 32), power_of_x(8 * nbytes - 32)}; }
constexpr Factors kOver16 = over(16), kOver32 = over(32), kOver64 = over(64), kOver128 = over(128),
                  kOver256 = over(256);

#define ZC_TARGET_256 __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))
#define ZC_TARGET_512 __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))

ZC_TARGET_256 inline __m256i fold(__m256i a, __m256i factors, __m256i next) {
  const __m256i low = _mm256_clmulepi64_epi128(a, factors, 0x00), high = _mm256_clmulepi64_epi128(a, factors, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}
ZC_TARGET_256 inline __m256i factors_256(Factors f) { return _mm256_set_epi64x(f.high, f.low, f.high, f.low); }
ZC_TARGET_256 inline __m256i load_256(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

ZC_TARGET_512 inline __m512i fold(__m512i a, __m512i factors, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(a, factors, 0x00), high = _mm512_clmulepi64_epi128(a, factors, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);
}
ZC_TARGET_512 inline __m512i factors_512(Factors f) {
  return _mm512_set_epi64(f.high, f.low, f.high, f.low, f.high, f.low, f.high, f.low);
}

/// The crc of two adjacent blocks of 16 bytes.
ZC_TARGET_256 inline std::uint32_t finish(__m128i first, __m128i second) {
  const __m128i factors = _mm_set_epi64x(kOver16.high, kOver16.low);
  const __m128i low = _mm_clmulepi64_si128(first, factors, 0x00), high = _mm_clmulepi64_si128(first, factors, 0x11);
  const __m128i all = _mm_xor_si128(_mm_xor_si128(low, high), second);
  const auto crc = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(all)));
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, static_cast<std::uint64_t>(_mm_extract_epi64(all, 1))));
}

}  // namespace

ZC_TARGET_256 std::uint32_t crc32c_fold_256(std::uint32_t crc, const std::byte* data, std::size_t nbytes) {
  constexpr std::size_t at_once = 128;
  if (nbytes < 2 * at_once) return crc32c_instruction(crc, data, nbytes);
  __m256i a = load_256(data), b = load_256(data + 32), c = load_256(data + 64), d = load_256(data + 96);
  a = _mm256_xor_si256(a, _mm256_set_epi64x(0, 0, 0, crc));
  const __m256i far = factors_256(kOver128);
  for (nbytes -= at_once, data += at_once; nbytes >= at_once; nbytes -= at_once, data += at_once) {
    a = fold(a, far, load_256(data));
    b = fold(b, far, load_256(data + 32));
    c = fold(c, far, load_256(data + 64));
    d = fold(d, far, load_256(data + 96));
  }
  const __m256i near = factors_256(kOver32);
  a = fold(fold(fold(a, near, b), near, c), near, d);
  crc = finish(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  return crc32c_instruction(crc, data, nbytes);
}

ZC_TARGET_512 std::uint32_t crc32c_fold_512(std::uint32_t crc, const std::byte* data, std::size_t nbytes) {
  constexpr std::size_t at_once = 256;
  if (nbytes < 2 * at_once) return crc32c_instruction(crc, data, nbytes);
  __m512i a = _mm512_loadu_si512(data), b = _mm512_loadu_si512(data + 64);
  __m512i c = _mm512_loadu_si512(data + 128), d = _mm512_loadu_si512(data + 192);
  a = _mm512_xor_si512(a, _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, crc));
  const __m512i far = factors_512(kOver256);
  for (nbytes -= at_once, data += at_once; nbytes >= at_once; nbytes -= at_once, data += at_once) {
    a = fold(a, far, _mm512_loadu_si512(data));
    b = fold(b, far, _mm512_loadu_si512(data + 64));
    c = fold(c, far, _mm512_loadu_si512(data + 128));
    d = fold(d, far, _mm512_loadu_si512(data + 192));
  }
  const __m512i near = factors_512(kOver64);
  a = fold(fold(fold(a, near, b), near, c), near, d);
  // The maskz forms avoid a false warning of GCC 12.
  const __m256i half = fold(_mm512_maskz_extracti64x4_epi64(0xf, a, 0), factors_256(kOver32),
                            _mm512_maskz_extracti64x4_epi64(0xf, a, 1));
  crc = finish(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return crc32c_instruction(crc, data, nbytes);
}

}  // namespace zcomm::mem
#endif
