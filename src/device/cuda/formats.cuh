// Floating formats in memory, and an element-by-element pass from one array to another.
#pragma once

#include "device/cuda/convert.cuh"
#include "device/cuda/launch.cuh"
#include "zcomm/dtype.hpp"

namespace zcomm::device::cuda {

/// load: to the compute type (f64, else f32); store: from either, rounded once.
template <DType dtype>
struct Format {
  static_assert(dtype == DType::float32);
  using Stored = float;
  static __device__ float load(float x) { return x; }
  static __device__ float store(float x) { return x; }
  static __device__ float store(double x) { return f64_to_f32(x); }
};
template <>
struct Format<DType::float64> {
  using Stored = double;
  static __device__ double load(double x) { return x; }
  static __device__ double store(float x) { return f32_to_f64(x); }
  static __device__ double store(double x) { return x; }
};
template <>
struct Format<DType::bfloat16> {
  using Stored = u16;
  static __device__ float load(u16 x) { return from_bf16(x); }
  static __device__ u16 store(float x) { return to_bf16(x); }
  static __device__ u16 store(double x) { return to_bf16(to_odd_f32(x)); }
};
template <>
struct Format<DType::float16> {
  using Stored = u16;
  static __device__ float load(u16 x) { return from_f16(x); }
  static __device__ u16 store(float x) { return to_f16(x); }
  static __device__ u16 store(double x) { return to_f16(to_odd_f32(x)); }
};

/// Converts.
struct Convert {
  template <class Out, class Wide>
  __device__ typename Out::Stored of(Wide x) {
    return Out::store(x);
  }
};

/// dst = work(src) for this thread's share: elements first, first + stride, ... among packs of `width`, then among the
/// rest.
template <class Out, class In, int width, class Work>
__device__ void each_element(void* dst, const void* src, std::size_t count, std::size_t first, std::size_t stride,
                             Work& work) {
  const std::size_t packs = count / width;
  for (std::size_t i = first; i < packs; i += stride) {
    const auto in = static_cast<const Pack<typename In::Stored, width>*>(src)[i];
    Pack<typename Out::Stored, width> out;
    for (int k = 0; k < width; ++k) out.at[k] = work.template of<Out>(In::load(in.at[k]));
    static_cast<Pack<typename Out::Stored, width>*>(dst)[i] = out;
  }
  if constexpr (width > 1)
    for (std::size_t i = packs * width + first; i < count; i += stride)
      static_cast<typename Out::Stored*>(dst)[i] =
          work.template of<Out>(In::load(static_cast<const typename In::Stored*>(src)[i]));
}

}  // namespace zcomm::device::cuda
