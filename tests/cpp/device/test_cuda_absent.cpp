// The accelerator where there is none: says so, and nothing crashes.
#include <array>

#include "device/cuda.hpp"
#include "device/device.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"

namespace zcomm::device::cuda {
namespace {

TEST(cuda, says_whether_it_is_there) {
  EXPECT_EQ(available(), device_count() > 0);
  EXPECT_FALSE(build_info().empty());
}

TEST(cuda, without_a_device_nothing_crashes) {
  if (available()) return;
  std::array<char, 64> memory{};
  EXPECT_FALSE(page_lock(memory.data(), memory.size()));
  page_unlock(memory.data());
  if (build_info() == "built without CUDA") {
    EXPECT_THROW_WITH(make_cuda_device(0), Unsupported, "device=\"cpu\"");
    EXPECT_THROW(DeviceScope(0), Unsupported);
  } else {
    EXPECT_THROW_WITH(make_cuda_device(0), CudaError, "no CUDA device (");
    EXPECT_THROW_WITH(make_cuda_device(0), CudaError, "device=\"cpu\"");
    EXPECT_THROW(DeviceScope(0), CudaError);
  }
}

TEST(cuda, an_index_that_is_not_there) {
  if (!available()) return;
  EXPECT_THROW_WITH(make_cuda_device(device_count()), InvalidArgument, "expected one of cuda:0 to");
  EXPECT_THROW(make_cuda_device(-1), InvalidArgument);
}

}  // namespace
}  // namespace zcomm::device::cuda
