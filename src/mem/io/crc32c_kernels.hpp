// The kernels of crc32c; crc32c.cpp chooses. Each takes and returns the state before its final inversion.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm::mem {

inline constexpr std::uint32_t kCrc32cPolynomial = 0x82F63B78u;  ///< reflected

std::uint32_t crc32c_tables(std::uint32_t crc, const std::byte* data, std::size_t nbytes);
#if defined(__x86_64__)
std::uint32_t crc32c_instruction(std::uint32_t crc, const std::byte* data, std::size_t nbytes);  ///< SSE4.2
std::uint32_t crc32c_fold_256(std::uint32_t crc, const std::byte* data, std::size_t nbytes);     ///< AVX2, VPCLMULQDQ
std::uint32_t crc32c_fold_512(std::uint32_t crc, const std::byte* data, std::size_t nbytes);     ///< AVX-512F and that
#endif

using Crc32cKernel = std::uint32_t (*)(std::uint32_t crc, const std::byte* data, std::size_t nbytes);
struct NamedCrc32c {
  const char* name;
  Crc32cKernel kernel;
  bool here;  ///< CPU and operating system support it, and ZCOMM_ISA does not forbid it
};
/// The fastest is last.
struct Crc32cKernels {
  NamedCrc32c at[4];
};
const Crc32cKernels& crc32c_kernels();

}  // namespace zcomm::mem
