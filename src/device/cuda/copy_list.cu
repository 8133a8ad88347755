// Pack and unpack on the device: thousands of tensors in one launch.
//
// A block of threads copies one chunk of one item, which it finds by binary search: 12 loads for 4096 items, the same
// for all threads and mostly cached, for 16 to 64 KiB moved. Equal types are copied as bytes, 16 at a time if both
// sides are aligned, otherwise by elements; 2 x size bytes per element through memory.
#include "device/cuda/formats.cuh"
#include "device/cuda/tasks.hpp"

namespace zcomm::device::cuda {
namespace {

template <class V>
struct Plain {
  using Stored = V;
  static __device__ V load(V x) { return x; }
  static __device__ V store(V x) { return x; }
};

/// The item of chunk `chunk`: the last nonempty one that does not begin after it.
__device__ inline const CopyItem& item_of(const CopyLaunch& args, std::uint64_t chunk) {
  std::size_t low = 0, high = args.count;
  while (high - low > 1) {
    const std::size_t middle = low + (high - low) / 2;
    (args.items[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return args.items[low];
}

__device__ inline bool aligned_on_device(const void* data, std::size_t nbytes) {
  return (reinterpret_cast<std::uintptr_t>(data) & (nbytes - 1)) == 0;
}

template <class Out, class In>
__global__ void copy_list_kernel(const CopyLaunch args) {
  using To = typename Out::Stored;
  using From = typename In::Stored;
  constexpr int width = static_cast<int>(16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From)));
  Convert work;
  for (std::uint64_t chunk = blockIdx.x; chunk < args.chunks; chunk += gridDim.x) {
    const CopyItem item = item_of(args, chunk);
    const std::size_t begin = (chunk - item.first_chunk) * kCopyChunk;
    const std::size_t n = item.count - begin < kCopyChunk ? item.count - begin : kCopyChunk;
    To* dst = static_cast<To*>(item.dst) + begin;
    const From* src = static_cast<const From*>(item.src) + begin;
    if (aligned_on_device(dst, width * sizeof(To)) && aligned_on_device(src, width * sizeof(From))) {
      each_element<Out, In, width>(dst, src, n, threadIdx.x, blockDim.x, work);
    } else {
      each_element<Out, In, 1>(dst, src, n, threadIdx.x, blockDim.x, work);
    }
  }
}

template <class Out, class In>
void launch_as(const CopyLaunch& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(args.chunks < kMaxBlocks ? args.chunks : kMaxBlocks);
  if (blocks > 0) launch(copy_list_kernel<Out, In>, blocks, stream, args);
}

template <DType from>
void launch_from(const CopyLaunch& args, cudaStream_t stream) {
  switch (args.dst_dtype) {
    case DType::bfloat16:
      return launch_as<Format<DType::bfloat16>, Format<from>>(args, stream);
    case DType::float16:
      return launch_as<Format<DType::float16>, Format<from>>(args, stream);
    default:
      return launch_as<Format<DType::float32>, Format<from>>(args, stream);
  }
}

void launch_bytes(const CopyLaunch& args, cudaStream_t stream) {
  switch (size_of(args.dst_dtype)) {
    case 1:
      return launch_as<Plain<std::uint8_t>, Plain<std::uint8_t>>(args, stream);
    case 2:
      return launch_as<Plain<u16>, Plain<u16>>(args, stream);
    case 4:
      return launch_as<Plain<u32>, Plain<u32>>(args, stream);
    default:
      return launch_as<Plain<u64>, Plain<u64>>(args, stream);
  }
}

}  // namespace

void launch_copy_list(const CopyLaunch& args, std::uintptr_t native) {
  const auto stream = reinterpret_cast<cudaStream_t>(native);
  if (args.dst_dtype == args.src_dtype) return launch_bytes(args, stream);
  switch (args.src_dtype) {
    case DType::bfloat16:
      return launch_from<DType::bfloat16>(args, stream);
    case DType::float16:
      return launch_from<DType::float16>(args, stream);
    default:
      return launch_from<DType::float32>(args, stream);
  }
}

}  // namespace zcomm::device::cuda
