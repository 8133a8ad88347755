// The CUDA kernels of a build without CUDA: no CUDA stream exists to launch them on.
#include "base/error.hpp"
#include "device/cuda/tasks.hpp"

namespace zcomm::device::cuda {

void launch_scale(const Scale&, std::uintptr_t) { throw Unsupported("scale: zcomm was built without CUDA"); }
void launch_checksum(const Checksum&, std::uintptr_t) { throw Unsupported("checksum: zcomm was built without CUDA"); }
void launch_encode(const Codec&, const Encode&, std::uintptr_t) {
  throw Unsupported("encode: zcomm was built without CUDA");
}
void launch_decode_sum(const Codec&, const Decode&, std::uintptr_t) {
  throw Unsupported("decode_sum: zcomm was built without CUDA");
}
void launch_copy_list(const CopyLaunch&, std::uintptr_t) {
  throw Unsupported("copy_list: zcomm was built without CUDA");
}

}  // namespace zcomm::device::cuda
