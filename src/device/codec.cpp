// Checks arguments, then calls the codecs of the current instruction set.
#include "device/codec.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/float_mode.hpp"
#include "device/codec_layout.hpp"
#include "device/cpu/codec_table.hpp"
#include "device/in_parts.hpp"
#include "device/stream_kernels.hpp"

namespace zcomm {
namespace {

const char* kind_name(CodecKind kind) {
  switch (kind) {
    case CodecKind::block_int:
      return "block_int";
    case CodecKind::fp8_e4m3:
      return "fp8_e4m3";
    case CodecKind::sign:
      return "sign";
  }
  return "unknown";
}

bool has_bits(const Codec& codec) {
  switch (codec.kind) {
    case CodecKind::block_int:
      return codec.bits == 8 || codec.bits == 4;
    case CodecKind::fp8_e4m3:
      return codec.bits == 8;
    case CodecKind::sign:
      return codec.bits == 1;
  }
  return false;
}

std::size_t aligned(std::size_t nbytes) { return (nbytes + kEncodedAlign - 1) / kEncodedAlign * kEncodedAlign; }
std::size_t blocks_of(std::size_t count) { return (count + kCodecBlock - 1) / kCodecBlock; }

}  // namespace

void check_codec(const Codec& codec) {
  if (!has_bits(codec))
    throw InvalidArgument(text("codec ", kind_name(codec.kind), ": bits ", codec.bits,
                               "; block_int has 8 or 4, fp8_e4m3 has 8, sign has 1"));
  if (codec.rotate != 0 && codec.rotate != 32)
    throw InvalidArgument(text("codec ", kind_name(codec.kind), ": rotate ", codec.rotate, "; it must be 0 or 32"));
  if (codec.kind == CodecKind::sign && (codec.rotate != 0 || codec.stochastic))
    throw InvalidArgument(
        text("codec sign: ", codec.rotate != 0 ? "rotate" : "stochastic", " is not defined for signs; leave it out"));
}

std::uint32_t codec_id(const Codec& codec) {
  return static_cast<std::uint32_t>(codec.kind) | static_cast<std::uint32_t>(codec.bits) << 8 |
         static_cast<std::uint32_t>(codec.rotate) << 16 | (codec.stochastic ? 1u << 24 : 0u);
}

Codec codec_of(std::uint32_t id) {
  return {.kind = static_cast<CodecKind>(id & 0xff),
          .bits = static_cast<int>(id >> 8 & 0xff),
          .rotate = static_cast<int>(id >> 16 & 0xff),
          .stochastic = (id >> 24 & 1) != 0};
}

std::string name_of(const Codec& codec) {
  const char* kind = codec.kind == CodecKind::sign       ? "sign"
                     : codec.kind == CodecKind::fp8_e4m3 ? "fp8"
                     : codec.bits == 8                   ? "int8"
                                                         : "int4";
  return text(kind, codec.rotate != 0 ? text(":rotate=", codec.rotate) : "", codec.stochastic ? ":stochastic" : "");
}

std::size_t encoded_nbytes(const Codec& codec, std::size_t count) {
  check_codec(codec);
  const device::EncodedLayout layout = device::encoded_layout(codec, count);
  return layout.scales_nbytes + layout.codes_nbytes;
}

}  // namespace zcomm

namespace zcomm::device {

namespace plain {
extern const CodecTable kCodecs;
}
#if defined(__x86_64__)  // cmake drops the other files elsewhere
namespace avx2 {
extern const CodecTable kCodecs;
}
namespace avx512 {
extern const CodecTable kCodecs;
}
namespace avx512_bf16 {
extern const CodecTable kCodecs;
}
#endif

const CodecTable& codec_table(Isa isa) {
  if (isa > best_isa())
    throw Unsupported(text("this CPU has no ", name_of(isa), "; its best is ", name_of(best_isa())));
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2:
      return avx2::kCodecs;
    case Isa::avx512:
      return avx512::kCodecs;
    case Isa::avx512_bf16:
      return avx512_bf16::kCodecs;
#endif
    default:
      return plain::kCodecs;
  }
}

std::size_t written_codes(const Codec& codec, std::size_t count) {
  if (codec.kind == CodecKind::sign) return (count + 7) / 8;
  const std::size_t turn = codec.rotate == 0 ? 1 : static_cast<std::size_t>(codec.rotate);
  const std::size_t coded = (count + turn - 1) / turn * turn;
  if (codec.bits == 8) return coded;
  const std::size_t half = kCodecBlock / 2, last = coded % kCodecBlock;
  return coded / kCodecBlock * half + std::min(last, half);
}

EncodedLayout encoded_layout(const Codec& codec, std::size_t count) {
  const std::size_t scales = codec.kind == CodecKind::sign ? std::min<std::size_t>(count, 1) : blocks_of(count);
  return {aligned(scales * sizeof(std::uint16_t)), aligned(written_codes(codec, count))};
}

Encoded encoded_at(std::byte* data, const Codec& codec, std::size_t count) {
  const EncodedLayout layout = encoded_layout(codec, count);
  return {reinterpret_cast<std::uint16_t*>(data), reinterpret_cast<std::uint8_t*>(data + layout.scales_nbytes),
          layout.scales_nbytes, layout.codes_nbytes};
}

namespace {

const CodecTable& current_codecs() {
  static const CodecTable& table = codec_table(current_isa());
  return table;
}

bool is_wide_enough(DType dtype) {
  return dtype == DType::float32 || dtype == DType::bfloat16 || dtype == DType::float16;
}

void check_dtype(const char* call, const char* name, DType dtype) {
  if (!is_wide_enough(dtype))
    throw InvalidArgument(text(call, ": ", name, " is ", name_of(dtype), "; it must be float32, bfloat16 or float16"));
}

void check_encoded(const char* call, const char* name, const void* data) {
  if (reinterpret_cast<std::uintptr_t>(data) % kEncodedAlign != 0)
    throw InvalidArgument(text(call, ": ", name, " at ", data, " is not aligned to ", kEncodedAlign, " bytes"));
}

void check_mask(const char* call, const Codec& codec, const std::uint8_t* mask) {
  if (mask != nullptr && codec.kind != CodecKind::sign)
    throw InvalidArgument(text(call, ": codec ", kind_name(codec.kind), " has no mask; only sign has one"));
}

EncodeCall call_of(const Codec& codec, const Encode& args) {
  EncodeCall call{};
  call.codec = codec;
  call.out = encoded_at(args.out, codec, args.count);
  call.in = args.in, call.in_dtype = args.dtype;
  call.error = args.error, call.error_dtype = args.error_dtype;
  if (args.error != nullptr && args.error_dtype == DType::int8) {
    const Encoded error = encoded_at(static_cast<std::byte*>(args.error), kInt8Codec, args.count);
    call.error = error.codes, call.error_scales = error.scales;
  }
  call.base = args.base, call.base_dtype = args.base_dtype;
  call.mask = args.mask;
  call.keep = args.keep;
  call.seed = args.seed, call.first_block = args.first_index / kCodecBlock;
  call.end = args.count;
  return call;
}

void clear_rest(const Codec& codec, const Encoded& out, std::size_t count) {
  const std::size_t scales = (codec.kind == CodecKind::sign ? 1 : blocks_of(count)) * sizeof(std::uint16_t);
  const std::size_t codes = written_codes(codec, count);
  std::memset(reinterpret_cast<std::byte*>(out.scales) + scales, 0, out.scales_nbytes - scales);
  std::memset(out.codes + codes, 0, out.codes_nbytes - codes);
}

/// run(pass): calls `pass` with ranges of elements that together are all of them.
template <class Run>
void encode_by(const CodecTable& table, const Codec& codec, const Encode& args, const Run& run) {
  check_encode(codec, args);
  if (args.count == 0) return;
  const EncodeCall whole = call_of(codec, args);
  const auto pass = [&whole](void (*kernel)(const EncodeCall&)) {
    return [&whole, kernel](std::size_t begin, std::size_t end) {
      EncodeCall call = whole;
      call.begin = begin, call.end = end;
      kernel(call);
    };
  };
  if (codec.kind == CodecKind::sign) {
    run(pass(table.squares));
    const DefaultFloatMode mode;
    table.set_sign_scale(whole.out, args.count);
  }
  run(pass(table.encode));
  clear_rest(codec, whole.out, args.count);
}

DecodeCall call_of(const Codec& codec, const Decode& args) {
  DecodeCall call{};
  call.codec = codec;
  call.in = args.in.data(), call.in_count = args.in.size();
  call.scales_nbytes = encoded_layout(codec, args.count).scales_nbytes;
  call.out = args.out, call.out_dtype = args.dtype;
  call.mask = args.mask;
  call.divide_by = args.divide_by;
  call.accumulate = args.accumulate;
  call.streaming = !args.accumulate && wants_streaming(args.stores, args.count * size_of(args.dtype));
  call.end = args.count;
  return call;
}

}  // namespace

void check_encode(const Codec& codec, const Encode& args) {
  check_codec(codec);
  check_dtype("encode", "in", args.dtype);
  if (args.error != nullptr && args.error_dtype != DType::float32 && args.error_dtype != DType::bfloat16 &&
      args.error_dtype != DType::int8)
    throw InvalidArgument(
        text("encode: error is ", name_of(args.error_dtype), "; it must be float32, bfloat16 or int8"));
  if (args.base != nullptr) check_dtype("encode", "base", args.base_dtype);
  check_mask("encode", codec, args.mask);
  if (!(args.keep >= 0.0f && args.keep < 1.0f))
    throw InvalidArgument(text("encode: keep ", args.keep, " is not in [0, 1)"));
  if (args.first_index % kCodecBlock != 0)
    throw InvalidArgument(
        text("encode: first_index ", args.first_index, " is not a multiple of ", kCodecBlock, ", the block"));
  if (args.count == 0) return;
  if (args.out == nullptr || args.in == nullptr)
    throw InvalidArgument(text("encode: ", args.out == nullptr ? "out" : "in", " is null, count ", args.count));
  check_encoded("encode", "out", args.out);
  if (args.error != nullptr && args.error_dtype == DType::int8) check_encoded("encode", "error", args.error);
}

void check_decode(const Codec& codec, const Decode& args) {
  check_codec(codec);
  check_dtype("decode", "out", args.dtype);
  check_mask("decode", codec, args.mask);
  if (args.in.empty()) throw InvalidArgument("decode: no input; give at least one encoded part");
  if (!(args.divide_by > 0.0f)) throw InvalidArgument(text("decode: divide_by ", args.divide_by, " is not positive"));
  if (args.count == 0) return;
  if (args.out == nullptr) throw InvalidArgument(text("decode: out is null, count ", args.count));
  for (std::size_t r = 0; r < args.in.size(); ++r) {
    if (args.in[r] == nullptr) throw InvalidArgument(text("decode: in[", r, "] is null, count ", args.count));
    check_encoded("decode", "in", args.in[r]);
  }
}

void check_device_decode(const Codec& codec, const Decode& args) {
  check_decode(codec, args);
  if (args.in.size() > kMaxKernelBuffers)
    throw InvalidArgument(
        text("decode on a device: ", args.in.size(), " inputs; expected at most ", kMaxKernelBuffers));
}

void encode_with(const CodecTable& table, const Codec& codec, const Encode& args) {
  const DefaultFloatMode mode;
  encode_by(table, codec, args, [&args](const auto& body) { body(0, args.count); });
}

void encode(const Codec& codec, const Encode& args) { encode_with(current_codecs(), codec, args); }

void encode_in_parts(const Codec& codec, const Encode& args) {
  const std::size_t element_nbytes = size_of(args.dtype) + (args.error == nullptr ? 0 : 2 * size_of(args.error_dtype)) +
                                     (args.base == nullptr ? 0 : 2 * size_of(args.base_dtype)) + 1;
  encode_by(current_codecs(), codec, args,
            [&args, element_nbytes](const auto& body) { in_parts(args.count, element_nbytes, body); });
}

void decode_sum_with(const CodecTable& table, const Codec& codec, const Decode& args) {
  check_decode(codec, args);
  if (args.count == 0) return;
  const DefaultFloatMode mode;
  table.decode(call_of(codec, args));
}

void decode_sum(const Codec& codec, const Decode& args) { decode_sum_with(current_codecs(), codec, args); }

void decode_sum_in_parts(const Codec& codec, const Decode& args) {
  check_decode(codec, args);
  if (args.count == 0) return;
  const DecodeCall whole = call_of(codec, args);
  const std::size_t element_nbytes = args.in.size() + size_of(args.dtype);
  in_parts(args.count, element_nbytes, [&whole](std::size_t begin, std::size_t end) {
    DecodeCall call = whole;
    call.begin = begin, call.end = end;
    current_codecs().decode(call);
  });
}

}  // namespace zcomm::device
