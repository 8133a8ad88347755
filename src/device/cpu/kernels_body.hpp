// The element kernels, written once as loops that the compiler vectorises; see [Note: one definition].
//
// A block of kBlock elements is accumulated in L1: the first one to three sources in a single pass, the others one by
// one, in the given order; then finished, rounded and stored to each destination. Vector body and tail do the same
// elementwise arithmetic, so results do not depend on the vector width or a call's first element.
#pragma once

#include "device/cpu/kernels_table.hpp"
#include "device/cpu/stores_body.hpp"

namespace zcomm::device::ZC_ISA {
namespace {

constexpr size_t kBlock = 1024;
constexpr size_t kStreamedBlock = 128;  // alternating short reads and non-temporal writes is 20 % faster than long ones

// -- element types: storage, accumulator, the four operations

template <class V>
struct Real {
  using Stored = V;
  using Acc = V;
  static ZC_INLINE Acc load(Stored x) { return x; }
  static ZC_INLINE Acc sum(Acc a, Acc b) { return a + b; }
  static ZC_INLINE Acc prod(Acc a, Acc b) { return a * b; }
  static ZC_INLINE Acc min(Acc a, Acc b) { return (a < b) | (a != a) ? a : b; }  // b if b is NaN
  static ZC_INLINE Acc max(Acc a, Acc b) { return (a > b) | (a != a) ? a : b; }
};

struct Bf16 : Real<float> {
  using Stored = u16;
  static ZC_INLINE Acc load(Stored x) { return from_bf16(x); }
  static void widen(float* dst, const u16* src, size_t n) { widen_bf16(dst, src, n); }
  static void narrow(u16* dst, const float* src, size_t n) { narrow_bf16(dst, src, n); }
};

struct F16 : Real<float> {
  using Stored = u16;
  static ZC_INLINE Acc load(Stored x) { return from_f16(x); }
  static void widen(float* dst, const u16* src, size_t n) { widen_f16(dst, src, n); }
  static void narrow(u16* dst, const float* src, size_t n) { narrow_f16(dst, src, n); }
};

/// V wraps around; the arithmetic uses the unsigned type U, which defines overflow.
template <class V, class U>
struct Whole {
  using Stored = V;
  using Acc = V;
  static ZC_INLINE Acc load(Stored x) { return x; }
  static ZC_INLINE Acc sum(Acc a, Acc b) { return static_cast<Acc>(static_cast<U>(a) + static_cast<U>(b)); }
  static ZC_INLINE Acc prod(Acc a, Acc b) { return static_cast<Acc>(static_cast<U>(a) * static_cast<U>(b)); }
  static ZC_INLINE Acc min(Acc a, Acc b) { return b < a ? b : a; }
  static ZC_INLINE Acc max(Acc a, Acc b) { return a < b ? b : a; }
};

struct Bool {
  using Stored = std::uint8_t;
  using Acc = std::uint8_t;
  static ZC_INLINE Acc load(Stored x) { return x != 0; }
  static ZC_INLINE Acc sum(Acc a, Acc b) { return a | b; }
  static ZC_INLINE Acc prod(Acc a, Acc b) { return a & b; }
  static ZC_INLINE Acc min(Acc a, Acc b) { return a & b; }
  static ZC_INLINE Acc max(Acc a, Acc b) { return a | b; }
};

template <class T, ReduceOp op>
ZC_INLINE typename T::Acc apply(typename T::Acc a, typename T::Acc b) {
  if constexpr (op == ReduceOp::min) return T::min(a, b);
  if constexpr (op == ReduceOp::max) return T::max(a, b);
  if constexpr (op == ReduceOp::prod) return T::prod(a, b);
  return T::sum(a, b);
}

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

// -- one block

enum class Finish { none, multiply, divide };

template <Finish finish, class Acc>
ZC_INLINE Acc finished(Acc x, Acc factor) {
  if constexpr (finish == Finish::multiply) return x * factor;
  if constexpr (finish == Finish::divide) return x / factor;
  return x;
}

/// acc = finish(the first `sources` (1 to 3) sources). acc may be one of them.
template <class T, ReduceOp op, Finish finish = Finish::none>
void begin_block(typename T::Acc* acc, const typename T::Stored* const* src, size_t sources, size_t n,
                 typename T::Acc factor = {}) {
  const auto *a = src[0], *b = src[sources > 1 ? 1 : 0], *c = src[sources > 2 ? 2 : 0];
  if (sources == 1) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) acc[i] = finished<finish>(T::load(a[i]), factor);
  } else if (sources == 2) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) acc[i] = finished<finish>(apply<T, op>(T::load(a[i]), T::load(b[i])), factor);
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i)
      acc[i] = finished<finish>(apply<T, op>(apply<T, op>(T::load(a[i]), T::load(b[i])), T::load(c[i])), factor);
  }
}

/// acc = acc op src
template <class T, ReduceOp op>
void add_source(typename T::Acc* acc, const typename T::Stored* src, size_t n) {
  if constexpr (same<T, F16>) {
    alignas(64) float wide[kBlock];
    F16::widen(wide, src, n);
    add_source<Real<float>, op>(acc, wide, n);
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) acc[i] = apply<T, op>(acc[i], T::load(src[i]));
  }
}

/// acc = finish(all sources, elements [begin, begin + n))
template <class T, ReduceOp op>
void accumulate_block(typename T::Acc* acc, const ReduceCall& call, size_t begin, size_t n) {
  using Stored = typename T::Stored;
  using Acc = typename T::Acc;
  // Instructions widen f16, and the compiler does not generate them from a loop: one source at a time.
  const size_t most = same<T, F16> ? 1 : 3, fused = call.src_count < most ? call.src_count : most;
  const Stored* first[3] = {};
  for (size_t s = 0; s < fused; ++s) first[s] = static_cast<const Stored*>(call.src[s]) + begin;

  if constexpr (op == ReduceOp::avg) {
    // Multiplying by the inverse of a power of two gives the same bits as dividing, faster.
    const bool power_of_two = (call.src_count & (call.src_count - 1)) == 0;
    const Acc divisor = static_cast<Acc>(call.src_count), inverse = Acc(1) / divisor;
    if (fused == call.src_count && !same<T, F16>)
      return power_of_two ? begin_block<T, op, Finish::multiply>(acc, first, fused, n, inverse)
                          : begin_block<T, op, Finish::divide>(acc, first, fused, n, divisor);
  }
  if constexpr (same<T, F16>) {
    F16::widen(acc, first[0], n);
  } else {
    begin_block<T, op>(acc, first, fused, n);
  }
  for (size_t s = fused; s < call.src_count; ++s)
    add_source<T, op>(acc, static_cast<const Stored*>(call.src[s]) + begin, n);
  if constexpr (op == ReduceOp::avg) {
    const Acc divisor = static_cast<Acc>(call.src_count);
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) acc[i] /= divisor;
  }
}

/// dst[d] (+)= value for each d; value has the element type of dst.
template <class T>
void store_block(const ReduceCall& call, size_t begin, typename T::Stored* value, size_t n) {
  using Stored = typename T::Stored;
  for (size_t d = 0; d < call.dst_count; ++d) {
    Stored* dst = static_cast<Stored*>(call.dst[d]) + begin;
    if (!call.accumulate) {
      store_bytes(dst, value, n * sizeof(Stored), call.streaming);
    } else if constexpr (same<Stored, typename T::Acc>) {
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) dst[i] = T::sum(T::load(dst[i]), value[i]);
    } else {
      float old[kBlock], added[kBlock];
      T::widen(old, dst, n);
      T::widen(added, value, n);
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) old[i] = old[i] + added[i];
      T::narrow(dst, old, n);
    }
  }
}

template <class T, ReduceOp op>
void reduce_as(const ReduceCall& call) {
  using Stored = typename T::Stored;
  using Acc = typename T::Acc;
  constexpr bool narrow = !same<Stored, Acc>;
  alignas(64) Acc local[kBlock];
  alignas(64) Stored rounded[narrow ? kBlock : 1];
  // Up to three sources are read before the element is written, so dst may serve as the accumulator.
  const bool direct =
      !call.accumulate && !call.streaming && call.src_count <= 3 && (!narrow || call.out == DType::float32);

  const size_t most = call.streaming ? kStreamedBlock : kBlock;
  for (size_t begin = 0; begin < call.count; begin += most) {
    const size_t n = call.count - begin < most ? call.count - begin : most;
    Acc* acc = direct ? static_cast<Acc*>(call.dst[0]) + begin : local;
    accumulate_block<T, op>(acc, call, begin, n);
    if constexpr (!narrow) {
      store_block<T>(call, begin, acc, n);
    } else if (call.out == DType::float32) {
      store_block<Real<float>>(call, begin, acc, n);
    } else {
      const bool in_place = !call.accumulate && !call.streaming;
      Stored* value = in_place ? static_cast<Stored*>(call.dst[0]) + begin : rounded;
      T::narrow(value, acc, n);
      store_block<T>(call, begin, value, n);
    }
  }
  if (call.streaming) fence();
}

template <class T>
void reduce_of(const ReduceCall& call) {
  switch (call.op) {
    case ReduceOp::sum:
      return reduce_as<T, ReduceOp::sum>(call);
    case ReduceOp::avg:
      if constexpr (same<T, Real<float>> || same<T, Real<double>> || same<T, Bf16> || same<T, F16>)
        return reduce_as<T, ReduceOp::avg>(call);
      return;
    case ReduceOp::min:
      return reduce_as<T, ReduceOp::min>(call);
    case ReduceOp::max:
      return reduce_as<T, ReduceOp::max>(call);
    case ReduceOp::prod:
      return reduce_as<T, ReduceOp::prod>(call);
  }
}

void reduce(const ReduceCall& call) {
  switch (call.in) {
    case DType::float32:
      return reduce_of<Real<float>>(call);
    case DType::float64:
      return reduce_of<Real<double>>(call);
    case DType::float16:
      return reduce_of<F16>(call);
    case DType::bfloat16:
      return reduce_of<Bf16>(call);
    case DType::int8:
      return reduce_of<Whole<std::int8_t, u32>>(call);
    case DType::uint8:
      return reduce_of<Whole<std::uint8_t, u32>>(call);
    case DType::int32:
      return reduce_of<Whole<std::int32_t, u32>>(call);
    case DType::int64:
      return reduce_of<Whole<std::int64_t, u64>>(call);
    case DType::boolean:
      return reduce_of<Bool>(call);
  }
}

// -- cast, copy

template <class From, class To>
void convert(To* dst, const From* src, size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) dst[i] = static_cast<To>(src[i]);
}

void cast_from_f64(void* dst, DType dst_dtype, const double* src, size_t n) {
  if (dst_dtype == DType::float32) return convert(static_cast<float*>(dst), src, n);
  float odd[kBlock];
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) odd[i] = to_odd_f32(src[i]);
  dst_dtype == DType::bfloat16 ? narrow_bf16(static_cast<u16*>(dst), odd, n)
                               : narrow_f16(static_cast<u16*>(dst), odd, n);
}

void cast_from_f32(void* dst, DType dst_dtype, const float* src, size_t n) {
  if (dst_dtype == DType::bfloat16) return narrow_bf16(static_cast<u16*>(dst), src, n);
  if (dst_dtype == DType::float16) return narrow_f16(static_cast<u16*>(dst), src, n);
  if (dst_dtype == DType::float64) return convert(static_cast<double*>(dst), src, n);
  memcpy(dst, src, n * sizeof(float));
}

void cast_block(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t n) {
  if (src_dtype == DType::float64) return cast_from_f64(dst, dst_dtype, static_cast<const double*>(src), n);
  if (src_dtype == DType::float32) return cast_from_f32(dst, dst_dtype, static_cast<const float*>(src), n);
  float local[kBlock];
  float* wide = dst_dtype == DType::float32 ? static_cast<float*>(dst) : local;
  src_dtype == DType::bfloat16 ? widen_bf16(wide, static_cast<const u16*>(src), n)
                               : widen_f16(wide, static_cast<const u16*>(src), n);
  if (wide == local) cast_from_f32(dst, dst_dtype, local, n);
}

size_t float_size(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }

void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t count) {
  const size_t dst_size = float_size(dst_dtype), src_size = float_size(src_dtype);
  for (size_t i = 0; i < count; i += kBlock)
    cast_block(static_cast<char*>(dst) + i * dst_size, dst_dtype, static_cast<const char*>(src) + i * src_size,
               src_dtype, count - i < kBlock ? count - i : kBlock);
}

void stream(void* dst, const void* src, size_t nbytes) {
  stream_bytes(dst, src, nbytes);
  fence();
}

}  // namespace

extern const KernelTable kKernels;
const KernelTable kKernels = {reduce, cast, stream};

}  // namespace zcomm::device::ZC_ISA
