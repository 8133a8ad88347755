// Where a GPU is, the driver keeps threads of its own from the first use on: there a test may leave threads behind.
#include "device/cuda/cuda.hpp"
#include "test.hpp"

namespace zcomm::test {
namespace {

[[maybe_unused]] const bool has_gpu = (threads_may_stay() |= device::cuda::available());

}  // namespace
}  // namespace zcomm::test
