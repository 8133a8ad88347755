// The CUDA optimizer kernels of a build without CUDA: no CUDA stream exists to launch them on.
#include "base/error.hpp"
#include "optim/cuda/kernels.hpp"

namespace zcomm::optim::cuda {
namespace {

[[noreturn]] void unsupported(const char* what) { throw Unsupported(text(what, ": zcomm was built without CUDA")); }

}  // namespace

void launch_step(const OptimShard&, int, const AdamFactors&, const OnDevice<AdamFactors>*, std::uintptr_t) {
  unsupported("adam");
}
void launch_step(const OptimShard&, int, const LionFactors&, const OnDevice<LionFactors>*, std::uintptr_t) {
  unsupported("lion");
}
void launch_step(const OptimShard&, int, const SgdFactors&, const OnDevice<SgdFactors>*, std::uintptr_t) {
  unsupported("sgd");
}
void launch_step(const OptimShard&, int, const AdagradFactors&, const OnDevice<AdagradFactors>*, std::uintptr_t) {
  unsupported("adagrad");
}
void launch_advance(std::span<const StreamAdamItem>, const StreamAdam&, OnDevice<AdamFactors>*, std::uintptr_t) {
  unsupported("adam");
}
void launch_adam(std::span<const StreamAdamItem>, const OnDevice<AdamFactors>*, std::uintptr_t) { unsupported("adam"); }
void launch_squares(double*, const void*, DType, std::size_t, std::uintptr_t) { unsupported("squares"); }
void launch_norm(std::int64_t*, const void*, DType, std::size_t, std::uintptr_t) { unsupported("norm"); }

}  // namespace zcomm::optim::cuda
