#include "device/emulated_kernels.hpp"

#define cuda emulated
#include "device/cuda/cast.cu"
#include "device/cuda/checksum.cu"
#include "device/cuda/codec.cu"
#include "device/cuda/copy_list.cu"
#include "device/cuda/kernels.cu"
#include "device/cuda/sign.cu"
#undef cuda

namespace zcomm::device::emulated {

void reduce(const Reduce& args) {
  ReduceLaunch launch{};
  for (std::size_t d = 0; d < args.dst.size(); ++d) launch.dst[d] = args.dst[d];
  for (std::size_t s = 0; s < args.src.size(); ++s) launch.src[s] = args.src[s];
  launch.dst_count = static_cast<int>(args.dst.size());
  launch.src_count = static_cast<int>(args.src.size());
  launch.count = args.count;
  launch.in = args.in;
  launch.out = args.out;
  launch.op = args.op;
  launch.accumulate = args.accumulate;
  launch.remote = args.remote;
  launch_reduce(launch, nullptr);
}

unsigned last_grid() { return gridDim.x; }

void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) {
  launch_cast(dst, dst_dtype, src, src_dtype, count, nullptr);
}

}  // namespace zcomm::device::emulated
