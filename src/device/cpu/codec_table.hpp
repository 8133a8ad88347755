// CodecTable: the codecs of one instruction set; raw pointers only, see [Note: one definition] in kernels_table.hpp.
// Arguments are checked by the host's side (device/codec.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cpu_features.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm::device {

struct Encode;
struct Decode;

/// An encoded part.
struct Encoded {
  std::uint16_t* scales;
  std::uint8_t* codes;
  std::size_t scales_nbytes, codes_nbytes;
};

/// Elements [begin, end) of a part, begin at a block; see Encode. Pointers are to the part's element 0.
struct EncodeCall {
  Codec codec;
  Encoded out;
  const void* in;
  DType in_dtype;
  void* error;  ///< may be null; int8: codes of block_int, with their scales
  std::uint16_t* error_scales;
  DType error_dtype;
  void* base;  ///< may be null
  DType base_dtype;
  const std::uint8_t* mask;  ///< may be null
  float keep;
  std::uint64_t seed, first_block;
  std::size_t begin, end;
};

/// Elements [begin, end) of a part, begin at a block; see Decode. streaming: without accumulate.
struct DecodeCall {
  Codec codec;
  const std::byte* const* in;
  std::size_t in_count;
  std::size_t scales_nbytes;
  void* out;
  DType out_dtype;
  const std::uint8_t* mask;
  float divide_by;
  bool accumulate, streaming;
  std::size_t begin, end;
};

struct CodecTable {
  /// sign: once the part's scale is there.
  void (*encode)(const EncodeCall& call);
  void (*decode)(const DecodeCall& call);
  /// sign: squares of [begin, end) into the bytes of their codes; then the part's scale from all blocks' squares.
  void (*squares)(const EncodeCall& call);
  void (*set_sign_scale)(const Encoded& out, std::size_t count);
};

/// Throws Unsupported if the CPU lacks it. Results of all tables are bitwise equal (except NaN payloads).
const CodecTable& codec_table(Isa isa);

/// With the kernels of one table, on this thread.
void encode_with(const CodecTable& table, const Codec& codec, const Encode& args);
void decode_sum_with(const CodecTable& table, const Codec& codec, const Decode& args);

}  // namespace zcomm::device
