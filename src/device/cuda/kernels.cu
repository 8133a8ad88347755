// reduce on the device, with the bits of device/cpu/kernels_body.hpp: the same operations in the same order, and no
// fused multiply-add (--fmad=false). Each thread reads 16 bytes of input at a time if all pointers are aligned.
#include <algorithm>

#include "device/cuda/convert.cuh"
#include "device/cuda/kernels.hpp"
#include "device/cuda/launch.cuh"

namespace zcomm::device::cuda {
namespace {

template <class V>
struct Real {
  using Stored = V;
  using Acc = V;
  static __device__ Acc load(Stored x) { return x; }
  static __device__ Stored store(Acc x) { return x; }
  static __device__ Acc sum(Acc a, Acc b) { return a + b; }
  static __device__ Acc prod(Acc a, Acc b) { return a * b; }
  static __device__ Acc min(Acc a, Acc b) { return a < b || a != a ? a : b; }  // b if b is NaN
  static __device__ Acc max(Acc a, Acc b) { return a > b || a != a ? a : b; }
};

struct Bf16 : Real<float> {
  using Stored = u16;
  static __device__ float load(u16 x) { return from_bf16(x); }
  static __device__ u16 store(float x) { return to_bf16(x); }
};

struct F16 : Real<float> {
  using Stored = u16;
  static __device__ float load(u16 x) { return from_f16(x); }
  static __device__ u16 store(float x) { return to_f16(x); }
};

/// V wraps around; the arithmetic uses the unsigned type U, which defines overflow.
template <class V, class U>
struct Whole {
  using Stored = V;
  using Acc = V;
  static __device__ Acc load(Stored x) { return x; }
  static __device__ Stored store(Acc x) { return x; }
  static __device__ Acc sum(Acc a, Acc b) { return static_cast<Acc>(static_cast<U>(a) + static_cast<U>(b)); }
  static __device__ Acc prod(Acc a, Acc b) { return static_cast<Acc>(static_cast<U>(a) * static_cast<U>(b)); }
  static __device__ Acc min(Acc a, Acc b) { return b < a ? b : a; }
  static __device__ Acc max(Acc a, Acc b) { return a < b ? b : a; }
};

struct Bool {
  using Stored = std::uint8_t;
  using Acc = std::uint8_t;
  static __device__ Acc load(Stored x) { return x != 0; }
  static __device__ Stored store(Acc x) { return x; }
  static __device__ Acc sum(Acc a, Acc b) { return a | b; }
  static __device__ Acc prod(Acc a, Acc b) { return a & b; }
  static __device__ Acc min(Acc a, Acc b) { return a & b; }
  static __device__ Acc max(Acc a, Acc b) { return a | b; }
};

template <class T>
__device__ typename T::Acc apply(ReduceOp op, typename T::Acc a, typename T::Acc b) {
  switch (op) {  // the same for all threads
    case ReduceOp::min:
      return T::min(a, b);
    case ReduceOp::max:
      return T::max(a, b);
    case ReduceOp::prod:
      return T::prod(a, b);
    default:
      return T::sum(a, b);
  }
}

constexpr int kAhead = 4;  ///< sources loaded at once

/// In: element type read; Out: element type written (In, or Real<float> for a 16-bit In).
template <class In, class Out, int width>
__global__ void reduce_kernel(const ReduceLaunch args) {
  using InPack = Pack<typename In::Stored, width>;
  using OutPack = Pack<typename Out::Stored, width>;
  const std::size_t packs = args.count / width;
  for (std::size_t i = first_item(); i < packs; i += item_stride()) {
    typename In::Acc acc[width] = {};
    for (int s = 0; s < args.src_count; s += kAhead) {
      InPack next[kAhead] = {};
      for (int j = 0; j < kAhead; ++j)
        if (s + j < args.src_count) next[j] = static_cast<const InPack*>(args.src[s + j])[i];
      for (int j = 0; j < kAhead; ++j) {
        if (s + j >= args.src_count) continue;
        for (int k = 0; k < width; ++k) {
          const auto x = In::load(next[j].at[k]);
          acc[k] = s + j == 0 ? x : apply<In>(args.op, acc[k], x);
        }
      }
    }
    OutPack value;
    for (int k = 0; k < width; ++k) {
      if (args.op == ReduceOp::avg) acc[k] = acc[k] / static_cast<typename In::Acc>(args.src_count);
      value.at[k] = Out::store(acc[k]);
    }
    for (int d = 0; d < args.dst_count; ++d) {
      OutPack* dst = static_cast<OutPack*>(args.dst[d]) + i;
      OutPack result = value;
      if (args.accumulate) {
        const OutPack old = *dst;
        for (int k = 0; k < width; ++k)
          result.at[k] = Out::store(Out::sum(Out::load(old.at[k]), Out::load(value.at[k])));
      }
      *dst = result;
    }
  }
}

bool aligned(const ReduceLaunch& args, std::size_t in_nbytes, std::size_t out_nbytes) {
  for (int s = 0; s < args.src_count; ++s)
    if (!aligned_to(args.src[s], in_nbytes)) return false;
  for (int d = 0; d < args.dst_count; ++d)
    if (!aligned_to(args.dst[d], out_nbytes)) return false;
  return true;
}

// The bytes that NVLink moves in the time of a load (0.45 to 0.9 TB/s, about a microsecond), far more than PCIe moves.
constexpr std::size_t kLinkNbytes = 1 << 20;

/// For `items` loads of so many bytes from each source; over a link, as many blocks as keep kLinkNbytes in flight.
unsigned reduce_blocks(const ReduceLaunch& args, std::size_t items, std::size_t load_nbytes) {
  const unsigned all = blocks_for(items);
  if (args.remote == 0) return all;
  const auto loads = static_cast<std::size_t>(std::min(args.remote, kAhead));
  return static_cast<unsigned>(std::min<std::size_t>(all, kLinkNbytes / (kThreads * load_nbytes * loads)));
}

template <class In, class Out>
void reduce_as(ReduceLaunch args, cudaStream_t stream) {
  // 16 bytes in; at most 16 bytes out, also if the output is wider.
  constexpr int width = 16 / static_cast<int>(sizeof(typename Out::Stored));
  constexpr std::size_t in_nbytes = width * sizeof(typename In::Stored),
                        out_nbytes = width * sizeof(typename Out::Stored);
  if (!aligned(args, in_nbytes, out_nbytes)) {
    launch(reduce_kernel<In, Out, 1>, reduce_blocks(args, args.count, sizeof(typename In::Stored)), stream, args);
    return;
  }
  const std::size_t packs = args.count / width, rest = args.count % width;
  if (packs > 0) launch(reduce_kernel<In, Out, width>, reduce_blocks(args, packs, in_nbytes), stream, args);
  if (rest == 0) return;
  for (int s = 0; s < args.src_count; ++s) args.src[s] = static_cast<const char*>(args.src[s]) + packs * in_nbytes;
  for (int d = 0; d < args.dst_count; ++d) args.dst[d] = static_cast<char*>(args.dst[d]) + packs * out_nbytes;
  args.count = rest;
  launch(reduce_kernel<In, Out, 1>, 1, stream, args);
}

}  // namespace

void launch_reduce(const ReduceLaunch& args, cudaStream_t stream) {
  const bool widen = args.out != args.in;  // 16-bit in, f32 out
  switch (args.in) {
    case DType::float32:
      return reduce_as<Real<float>, Real<float>>(args, stream);
    case DType::float64:
      return reduce_as<Real<double>, Real<double>>(args, stream);
    case DType::float16:
      return widen ? reduce_as<F16, Real<float>>(args, stream) : reduce_as<F16, F16>(args, stream);
    case DType::bfloat16:
      return widen ? reduce_as<Bf16, Real<float>>(args, stream) : reduce_as<Bf16, Bf16>(args, stream);
    case DType::int8:
      return reduce_as<Whole<std::int8_t, u32>, Whole<std::int8_t, u32>>(args, stream);
    case DType::uint8:
      return reduce_as<Whole<std::uint8_t, u32>, Whole<std::uint8_t, u32>>(args, stream);
    case DType::int32:
      return reduce_as<Whole<std::int32_t, u32>, Whole<std::int32_t, u32>>(args, stream);
    case DType::int64:
      return reduce_as<Whole<std::int64_t, u64>, Whole<std::int64_t, u64>>(args, stream);
    case DType::boolean:
      return reduce_as<Bool, Bool>(args, stream);
  }
}

}  // namespace zcomm::device::cuda
