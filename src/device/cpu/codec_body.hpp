// The codecs of one instruction set: each block of elements passes through the first-level cache once (sign: twice).
//
// See [Note: one definition]. Vector body and tail do the same arithmetic per element, so the bits do not depend on the
// instruction set; [Note: encoded part] in zcomm/codec.hpp has the format.
#pragma once

#include "device/arithmetic/fp8.hpp"
#include "device/cpu/codec_blocks.hpp"
#include "device/cpu/sign_body.hpp"

namespace zcomm::device::ZC_ISA {
namespace {

/// A block on its way. Several are, because a scale takes longer than the codes: the largest element and a division
/// wait for each other.
struct Pending {
  size_t begin, n, coded_count;
  const float *values, *coded;  ///< before and after the rotation
  const u16* narrow;            ///< not null: the elements are these bf16 numbers, and nothing else is needed of them
  u16 scale;
  Values room, turned;
};
constexpr size_t kPending = 4;

template <class Code>
void start_block(const EncodeCall& call, size_t begin, Pending& b) {
  b.begin = begin;
  b.n = b.coded_count = elements_of(begin, call.end);
  b.narrow = nullptr;
  if (call.in_dtype == DType::bfloat16 && call.error == nullptr && call.base == nullptr && call.codec.rotate == 0) {
    b.narrow = static_cast<const u16*>(call.in) + begin;
    b.scale = block_scale(largest_of(b.narrow, b.n), Code::kTop);
    return;
  }
  b.values = b.coded = read_block(call, begin, b.n, b.room);
  if (call.codec.rotate != 0) {
    b.coded_count = whole_turns(b.n);
    memcpy(b.turned.at, b.values, b.n * sizeof(float));
    for (size_t k = b.n; k < b.coded_count; ++k) b.turned.at[k] = 0.0f;
    turn(b.turned.at, b.turned.at, b.coded_count);
    b.coded = b.turned.at;
  }
  b.scale = block_scale(largest_of(b.coded, b.coded_count), Code::kTop);
}

template <class Code, class Key>
void put_block(u8* codes, const Pending& b, Key key) {
  const float scale = from_bf16(b.scale);
  b.narrow != nullptr ? put_codes<Code>(codes, b.narrow, b.n, scale, key)
                      : put_codes<Code>(codes, b.coded, b.coded_count, scale, key);
}

template <class Code>
void end_block(const EncodeCall& call, const Pending& b) {
  const bool finite = b.scale != kLostScale;
  const size_t block = b.begin / kBlock;
  u8* codes = call.out.codes + codes_nbytes<Code>(kBlock) * block;
  call.out.scales[block] = b.scale;
  if (!finite) {
    memset(codes, 0, codes_nbytes<Code>(b.coded_count));
  } else if (call.codec.stochastic) {
    put_block<Code>(codes, b, rounding_key(call.seed, call.first_block + block));
  } else {
    put_block<Code>(codes, b, Nearest{});
  }
  if (call.error == nullptr && call.base == nullptr) return;
  Values decoded;
  get_values<Code, false>(decoded.at, codes, b.coded_count, decoding_scale(b.scale, call.codec));
  if (call.codec.rotate != 0) turn(decoded.at, decoded.at, b.coded_count);
  finish_block(call, b.begin, b.values, decoded.at, b.n, finite);
}

template <class Code>
void encode_blocks(const EncodeCall& call) {
  Pending pending[kPending];
  for (size_t begin = call.begin; begin < call.end;) {
    size_t blocks = 0;
    for (; blocks < kPending && begin < call.end; begin += kBlock) start_block<Code>(call, begin, pending[blocks++]);
    for (size_t i = 0; i < blocks; ++i) end_block<Code>(call, pending[i]);
  }
}

void encode(const EncodeCall& call) {
  switch (call.codec.kind) {
    case CodecKind::block_int:
      return call.codec.bits == 4 ? encode_blocks<Int4Code>(call) : encode_blocks<Int8Code>(call);
    case CodecKind::fp8_e4m3:
      return encode_blocks<Fp8Code>(call);
    case CodecKind::sign:
      return encode_signs(call);
  }
}

// -- Decoding. A decoder of one block of one input: sum (+)= its values.

template <class Code>
struct BlockDecoder {
  template <bool add>
  static void get(const DecodeCall& call, const std::byte* in, size_t begin, float* sum, size_t n) {
    const size_t block = begin / kBlock;
    u16 scale;
    memcpy(&scale, in + block * sizeof(scale), sizeof(scale));
    const u8* codes = reinterpret_cast<const u8*>(in + call.scales_nbytes) + codes_nbytes<Code>(kBlock) * block;
    const float factor = decoding_scale(scale, call.codec);
    if (call.codec.rotate == 0) return get_values<Code, add>(sum, codes, n, factor);
    Values turned;
    const size_t coded_count = whole_turns(n);
    get_values<Code, false>(turned.at, codes, coded_count, factor);
    turn(turned.at, turned.at, coded_count);
#pragma GCC ivdep
    for (size_t k = 0; k < n; ++k) put_value<add>(sum[k], turned.at[k]);
  }
};

struct SignDecoder {
  template <bool add>
  static void get(const DecodeCall& call, const std::byte* in, size_t begin, float* sum, size_t n) {
    u16 scale;
    memcpy(&scale, in, sizeof(scale));
    Values values;
    float* const to = add ? values.at : sum;
    get_signs(to, reinterpret_cast<const u8*>(in + call.scales_nbytes) + begin / 8, n, from_bf16(scale));
    if (call.mask != nullptr) apply_mask(to, call.mask + begin / 8, n);
    if constexpr (!add) return;
#pragma GCC ivdep
    for (size_t k = 0; k < n; ++k) sum[k] = sum[k] + values.at[k];
  }
};

template <class Decoder>
void decode_block(const DecodeCall& call, size_t begin, size_t n) {
  Values sum;
  const bool direct = call.out_dtype == DType::float32 && !call.accumulate && !call.streaming;
  float* const to = direct ? static_cast<float*>(call.out) + begin : sum.at;
  Decoder::template get<false>(call, call.in[0], begin, to, n);
  for (size_t r = 1; r < call.in_count; ++r) Decoder::template get<true>(call, call.in[r], begin, to, n);
  if (call.divide_by != 1.0f) {
#pragma GCC ivdep
    for (size_t k = 0; k < n; ++k) to[k] = to[k] / call.divide_by;
  }
  if (call.accumulate) {
    Values room;
    const float* out = read(call.out, call.out_dtype, begin, n, room);
#pragma GCC ivdep
    for (size_t k = 0; k < n; ++k) to[k] = out[k] + to[k];
  }
  if (direct) return;
  if (!call.streaming) return write(call.out, call.out_dtype, begin, to, n);
  if (call.out_dtype == DType::float32)
    return stream_bytes(static_cast<float*>(call.out) + begin, to, n * sizeof(float));
  alignas(64) u16 narrow[kBlock];
  write(narrow, call.out_dtype, 0, to, n);
  stream_bytes(static_cast<u16*>(call.out) + begin, narrow, n * sizeof(u16));
}

template <class Decoder>
void decode_blocks(const DecodeCall& call) {
  for (size_t begin = call.begin; begin < call.end; begin += kBlock)
    decode_block<Decoder>(call, begin, elements_of(begin, call.end));
  if (call.streaming) fence();
}

void decode(const DecodeCall& call) {
  switch (call.codec.kind) {
    case CodecKind::block_int:
      return call.codec.bits == 4 ? decode_blocks<BlockDecoder<Int4Code>>(call)
                                  : decode_blocks<BlockDecoder<Int8Code>>(call);
    case CodecKind::fp8_e4m3:
      return decode_blocks<BlockDecoder<Fp8Code>>(call);
    case CodecKind::sign:
      return decode_blocks<SignDecoder>(call);
  }
}

}  // namespace

extern const CodecTable kCodecs;
const CodecTable kCodecs = {encode, decode, sign_squares, set_sign_scale};

}  // namespace zcomm::device::ZC_ISA
