// Stores around the cache, for one instruction set: included as device/convert_body.hpp; see [Note: one definition].
#pragma once

#include <cstring>

#include "device/convert_body.hpp"

namespace zcomm::device::ZC_ISA {
namespace {

/// memcpy with non-temporal stores; the caller fences once at the end.
inline void stream_bytes(void* dst_bytes, const void* src_bytes, size_t nbytes) {
#if defined(__x86_64__)
  auto* dst = static_cast<char*>(dst_bytes);
  const auto* src = static_cast<const char*>(src_bytes);
  const size_t offset = reinterpret_cast<u64>(dst) % 64;
  size_t i = offset == 0 ? 0 : 64 - offset;
  if (i > nbytes) i = nbytes;
  memcpy(dst, src, i);
  for (; i + 64 <= nbytes; i += 64) {  // a whole line at once, or write combining is lost
#if ZC_ISA_LEVEL >= 2
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
#elif ZC_ISA_LEVEL == 1
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), high);
#else
    for (size_t k = 0; k < 64; k += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i + k),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i + k)));
#endif
  }
  memcpy(dst + i, src + i, nbytes - i);
#else
  memcpy(dst_bytes, src_bytes, nbytes);
#endif
}

inline void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

inline void store_bytes(void* dst, const void* src, size_t nbytes, bool streaming) {
  if (streaming) return stream_bytes(dst, src, nbytes);
  if (dst != src) memcpy(dst, src, nbytes);
}

}  // namespace
}  // namespace zcomm::device::ZC_ISA
