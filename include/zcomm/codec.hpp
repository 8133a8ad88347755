// Codec: the form in which a collective sends the elements of a tensor: 8, 4 or 1 bits for each.
//
// [Note: encoded part] A part (the elements that one rank sends to another) is encoded as scales, then codes. Both
// begin at multiples of 64 bytes, and unused bytes are 0. Scales are bf16. An element's decoded value is its code times
// its scale:
//
// * block_int, 8 or 4 bits: an integer in [-127, 127] or [-7, 7]. 256 elements share a scale, the block's largest
//   magnitude over 127 or 7, rounded up to bf16, and at least 2^-118. The code is rint(element / scale). With 4 bits
//   byte k of a block holds elements k (low) and k + 128 (high).
// * fp8_e4m3: a float of 4 exponent and 3 fraction bits (OCP E4M3, largest 448), on the scale largest / 448.
// * sign: the part has one scale, the root mean square of its elements (sum: [Note: order of squares] in
//   device/arithmetic/sign.hpp), rounded to bf16. Bit k % 8 of byte k / 8 is 1 if element k is negative; zeros count as
//   positive.
//
// [Note: exact residue] A scale has 8 significant bits and a code at most 7, so decoded values are exact in f32. A code
// other than 0 is between half and twice the quotient, so the difference between an element and its decoded value is
// exact as well (Sterbenz): decoded + residue = element to the bit, but for the sign of a zero. This holds for
// block_int and fp8_e4m3 when they round to nearest and do not rotate; |residue| of block_int is at most largest / 254
// or largest / 14, times 1 + 2^-7 (and 2^-17 for the rounding of the quotient). Otherwise the residue is rounded once:
// sign is exact from half its scale up to 2^16 of it, and within 2^-24 of the scale below.
//
// The scale is NaN if an element of the block is infinite, NaN or not below 1.875 * 2^127 in magnitude; with sign, if
// the root mean square is not finite. All decoded values are then NaN, so that receivers see the overflow.
//
// [Note: rotation] rotate = 32: each 32 adjacent elements are multiplied by the Hadamard matrix (unscaled; missing
// elements are 0) before they are encoded, and again, times 1/32, after they are decoded. A single large element then
// spreads over 32, which lowers the scale. Five stages of sums and differences in f32; stage w = 1, 2, 4, 8, 16
// combines elements with positions that differ in bit w: (a, b) -> (a + b, a - b).
//
// Sources: block-wise codes: Dettmers et al. 2110.02861, ZeRO++ 2306.10209; signs: Tang et al. 2102.02888; rotation and
// differences: SDP4Bit 2410.15526.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace zcomm {

enum class CodecKind : std::uint8_t { block_int, fp8_e4m3, sign };

/// rotate: 0 or 32. stochastic: codes are rounded up or down by chance, so that their mean is the element. Neither goes
/// with sign.
struct Codec {
  CodecKind kind = CodecKind::block_int;
  int bits = 8;  ///< block_int: 8 or 4; fp8_e4m3: 8; sign: 1
  int rotate = 0;
  bool stochastic = false;
};

inline constexpr std::size_t kCodecBlock = 256;  ///< elements that share a scale
inline constexpr std::size_t kEncodedAlign = 64;

/// Throws InvalidArgument: bits, rotate or stochastic that do not go with the kind.
void check_codec(const Codec& codec);

/// All fields in one number, for ranks that compare their calls.
std::uint32_t codec_id(const Codec& codec);
Codec codec_of(std::uint32_t id);

/// "int8", "int4", "fp8" or "sign", with ":rotate=32" and ":stochastic" behind it.
std::string name_of(const Codec& codec);

/// Of `count` elements; a multiple of kEncodedAlign. Per element about 1.008 (8 bits), 0.508 (4 bits), 1/8 (sign).
std::size_t encoded_nbytes(const Codec& codec, std::size_t count);

}  // namespace zcomm
