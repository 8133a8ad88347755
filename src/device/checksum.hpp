// checksum: a 64-bit sum of mixed words that detects a change of device memory without copying it.
//
// Each 8-byte word is mixed with its position, so that exchanged, negated and equal words count. The sum is of
// integers modulo 2^64: any order of adding gives the same bits. It is no cryptographic hash.
// Source: the finalizer of MurmurHash3 (Austin Appleby, public domain).
#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm::device {

/// Adds the checksum of nbytes at data to *sum. The last word is padded with zeros.
struct Checksum {
  std::uint64_t* sum;
  const void* data;
  std::size_t nbytes;
};

#ifdef __CUDACC__
#define ZC_ON_BOTH __host__ __device__
#else
#define ZC_ON_BOTH
#endif

ZC_ON_BOTH inline std::uint64_t checksum_term(std::uint64_t word, std::uint64_t position) {
  std::uint64_t x = word + (position + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}
#undef ZC_ON_BOTH

/// Throws InvalidArgument: sum is null, or data is null with nbytes > 0.
void check_checksum(const Checksum& args);

/// On host memory.
void checksum(const Checksum& args);

}  // namespace zcomm::device
