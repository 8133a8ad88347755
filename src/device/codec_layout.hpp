// The places of scales and codes in an encoded part ([Note: encoded part] in zcomm/codec.hpp). Arguments are checked.
#pragma once

#include <cstddef>

#include "device/cpu/codec_table.hpp"
#include "zcomm/codec.hpp"

namespace zcomm::device {

inline constexpr Codec kInt8Codec{};  ///< of int8 errors

/// Both are multiples of kEncodedAlign.
struct EncodedLayout {
  std::size_t scales_nbytes, codes_nbytes;
};
EncodedLayout encoded_layout(const Codec& codec, std::size_t count);

/// Bytes of codes that blocks write; a rotation also writes codes of elements that fill up 32. The rest are 0.
std::size_t written_codes(const Codec& codec, std::size_t count);

Encoded encoded_at(std::byte* data, const Codec& codec, std::size_t count);

}  // namespace zcomm::device
