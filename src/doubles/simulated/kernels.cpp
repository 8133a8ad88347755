// Queued CPU kernels (doubles/simulated/kernels.hpp).
#include "doubles/simulated/kernels.hpp"

#include <vector>

#include "device/kernels_check.hpp"

namespace zcomm::device {

void SimulatedKernels::reduce(const Reduce& args) {
  check_device_reduce(args);
  if (args.count == 0) return;
  std::vector<void*> dst(args.dst.begin(), args.dst.end());
  std::vector<const void*> src(args.src.begin(), args.src.end());
  put_([copy = args, dst = std::move(dst), src = std::move(src)]() mutable {
    copy.dst = dst;
    copy.src = src;
    device::reduce(copy);
  });
}

void SimulatedKernels::cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) {
  check_cast(dst, dst_dtype, src, src_dtype, count);
  if (count == 0) return;
  put_([=] { device::cast(dst, dst_dtype, src, src_dtype, count); });
}

void SimulatedKernels::run(const KernelTask& task) {
  put_([copy = task.copy()] { copy->on_host(); });
}

}  // namespace zcomm::device
