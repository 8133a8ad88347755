// encode, decode_sum: a part of a tensor as a collective sends it, and the sum of the parts that a rank received.
//
// [Note: error feedback] A rank encodes h = in + error. The receivers compute with the decoded values d, and the rank
// keeps their difference: error = keep * error + (1 - keep) * (h - d), rounded to the type of `error`; keep = 0 is
// plain error feedback, 0.8 is LoCo's average. With keep = 0 and an f32 error, d + error = h as [Note: exact residue]
// in zcomm/codec.hpp states. If a block (with sign: the part) is not finite, its error becomes 0. int8 errors are
// encoded by block_int (8 bits, to nearest) themselves, in encoded_nbytes of it; zeros are an error of zero.
//
// [Note: differences] With a base, h = in - base + error, and base becomes base + d, rounded to its type. A receiver
// that decodes into an equal base (accumulate, same type) then has the same bits, so differences do not drift. After a
// block that is not finite, base is NaN on both sides.
//
// Bits: those of any instruction set and device are equal, whatever the number of threads, except NaN payloads. Sources
// are added in the order given, in f32. Thread rule: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "device/kernels.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm::device {

/// out: encoded_nbytes of it, aligned to 64 bytes; all are written. in: f32, bf16 or f16. error: null, or f32, bf16 or
/// int8 (a sequence of encoded bytes, see above). base: null, or f32, bf16 or f16. mask: null, or only with sign: one
/// bit per element in the order of the codes; elements with the bit 0 count as 0, decode to 0 and have no error.
/// stochastic: chances depend on seed and element number; first_index: of in[0], a multiple of kCodecBlock. No two of
/// the buffers overlap. Throws InvalidArgument.
struct Encode {
  std::byte* out;
  const void* in;
  DType dtype;
  std::size_t count;
  void* error = nullptr;
  DType error_dtype = DType::float32;
  float keep = 0.0f;
  void* base = nullptr;
  DType base_dtype = DType::bfloat16;
  const std::uint8_t* mask = nullptr;
  std::uint64_t seed = 0, first_index = 0;
};
void encode(const Codec& codec, const Encode& args);
/// The same; a large one runs on several threads, as reduce_in_parts does.
void encode_in_parts(const Codec& codec, const Encode& args);

/// out (+)= (in[0] + in[1] + ...) / divide_by, in f32, rounded once to f32, bf16 or f16. in: encoded parts of `count`
/// elements, aligned to 64 bytes. mask: as it was encoded. stores: a hint, ignored with accumulate. Throws
/// InvalidArgument.
struct Decode {
  void* out;
  std::span<const std::byte* const> in;
  std::size_t count;
  DType dtype = DType::float32;
  bool accumulate = false;
  float divide_by = 1.0f;
  const std::uint8_t* mask = nullptr;
  Stores stores = Stores::automatic;
};
void decode_sum(const Codec& codec, const Decode& args);
/// The same; a large one runs on several threads, as reduce_in_parts does.
void decode_sum_in_parts(const Codec& codec, const Decode& args);

void check_encode(const Codec& codec, const Encode& args);
void check_decode(const Codec& codec, const Decode& args);
/// With the limit of stream_kernels.hpp on the number of inputs.
void check_device_decode(const Codec& codec, const Decode& args);

}  // namespace zcomm::device
