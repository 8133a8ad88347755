// crc32c (Castagnoli): the checksum of swapped blocks.
//
// Uses carry-less multiplication or the CPU's instruction if available (chosen at run time), tables otherwise; all give
// the same value. Thread rule: pure functions. Source: RFC 3720 appendix B.4 (polynomial 0x1EDC6F41, reflected).
#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm::mem {

std::uint32_t crc32c(const std::byte* data, std::size_t nbytes);
/// The table version, whatever the CPU supports (reference of the tests).
std::uint32_t crc32c_plain(const std::byte* data, std::size_t nbytes);

}  // namespace zcomm::mem
