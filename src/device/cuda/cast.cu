// cast and scale on the device, with the bits of device/cpu/kernels_body.hpp and device/scale.cpp.
//
// Both are memory-bound: 4 to 16 bytes per element and a few instructions. A thread processes 4 adjacent elements (8
// bytes of a 16-bit format, 16 of f32) in one load and one store if both pointers are aligned: 32 lanes are then whole
// 128-byte lines on both sides, with no more registers than 8 blocks per multiprocessor allow.
#include "device/cuda/formats.cuh"
#include "device/cuda/kernels.hpp"
#include "device/cuda/tasks.hpp"

namespace zcomm::device::cuda {
namespace {

constexpr int kWidth = 4;

template <class Work>
struct Elements {
  void* dst;
  const void* src;
  std::size_t count;
  Work work;
};

template <DType to, DType from, int width, class Work>
__global__ void elements_kernel(const Elements<Work> args) {
  auto work = args.work.begin();
  each_element<Format<to>, Format<from>, width>(args.dst, args.src, args.count, first_item(), item_stride(), work);
  args.work.end(work);
}

template <DType to, DType from, class Work>
void launch_elements(const Elements<Work>& args, cudaStream_t stream) {
  using Out = typename Format<to>::Stored;
  using In = typename Format<from>::Stored;
  if (aligned_to(args.dst, kWidth * sizeof(Out)) && aligned_to(args.src, kWidth * sizeof(In))) {
    launch(elements_kernel<to, from, kWidth, Work>, blocks_for((args.count + kWidth - 1) / kWidth), stream, args);
  } else {
    launch(elements_kernel<to, from, 1, Work>, blocks_for(args.count), stream, args);
  }
}

struct Cast {
  __device__ Convert begin() const { return {}; }
  __device__ void end(const Convert&) const {}
};

/// A thread's factor, and its count of nonfinite results.
struct Multiply {
  float factor;
  unsigned nonfinite = 0;

  template <class Out>
  __device__ typename Out::Stored of(float x) {
    const typename Out::Stored result = Out::store(x * factor);
    nonfinite += (__float_as_uint(Out::load(result)) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
    return result;
  }
};

struct Multiplied {
  float factor;
  const float* more;
  std::uint64_t* nonfinite;

  __device__ Multiply begin() const { return {more == nullptr ? factor : factor * *more}; }
  __device__ void end(const Multiply& work) const {  // rare, so a sum over the block first would not pay
    if (nonfinite != nullptr && work.nonfinite > 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(nonfinite), static_cast<unsigned long long>(work.nonfinite));
  }
};

template <DType from, class Work>
void launch_floats(const Elements<Work>& args, DType to, cudaStream_t stream) {
  switch (to) {
    case DType::bfloat16:
      return launch_elements<DType::bfloat16, from>(args, stream);
    case DType::float16:
      return launch_elements<DType::float16, from>(args, stream);
    default:
      return launch_elements<DType::float32, from>(args, stream);
  }
}

template <DType from>
void cast_from(const Elements<Cast>& args, DType to, cudaStream_t stream) {
  to == DType::float64 ? launch_elements<DType::float64, from>(args, stream) : launch_floats<from>(args, to, stream);
}

}  // namespace

void launch_cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count, cudaStream_t stream) {
  const Elements<Cast> args{dst, src, count, {}};
  switch (src_dtype) {
    case DType::float64:
      return cast_from<DType::float64>(args, dst_dtype, stream);
    case DType::bfloat16:
      return cast_from<DType::bfloat16>(args, dst_dtype, stream);
    case DType::float16:
      return cast_from<DType::float16>(args, dst_dtype, stream);
    default:
      return cast_from<DType::float32>(args, dst_dtype, stream);
  }
}

void launch_scale(const Scale& s, std::uintptr_t native) {
  const auto stream = reinterpret_cast<cudaStream_t>(native);
  const Elements<Multiplied> args{s.dst, s.src, s.count, {s.factor, s.more, s.nonfinite}};
  switch (s.src_dtype) {
    case DType::bfloat16:
      return launch_floats<DType::bfloat16>(args, s.dst_dtype, stream);
    case DType::float16:
      return launch_floats<DType::float16>(args, s.dst_dtype, stream);
    default:
      return launch_floats<DType::float32>(args, s.dst_dtype, stream);
  }
}

}  // namespace zcomm::device::cuda
