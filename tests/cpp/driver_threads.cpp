// On a machine with a GPU, the driver keeps threads of its own from its first use on, so a test may leave threads
// running.
#include "device/cuda/cuda.hpp"
#include "test.hpp"

namespace zcomm::test {
namespace {

[[maybe_unused]] const bool has_gpu = (threads_may_stay() |= device::cuda::available());

}  // namespace
}  // namespace zcomm::test
