// The accelerator on machines without one: calls throw Unsupported, and none crashes.
#include <array>
#include <string>
#include <utility>

#include "device/cuda/cuda.hpp"
#include "device/device.hpp"
#include "device/device_errors.hpp"
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

TEST(cuda, says_why_there_is_none) {
  const std::string old = no_device_text(Absence::old_driver, 12040, 13000, "driver version is insufficient");
  EXPECT_EQ(old,
            "no CUDA device (driver version is insufficient): the driver is too old: it serves CUDA 12.4, and this "
            "build needs CUDA 13.0: update the driver, or install a build for an older CUDA");
  for (const auto& [why, advice] : {std::pair{Absence::no_driver, "no NVIDIA driver is loaded: install one"},
                                    {Absence::none_shown, "see CUDA_VISIBLE_DEVICES"},
                                    {Absence::forked, "start it by spawn"},
                                    {Absence::other, "nvidia-smi shows which GPUs"}}) {
    const std::string said = no_device_text(why, 13000, 13000, "words");
    EXPECT_TRUE(said.find("no CUDA device (words): ") == 0 && said.find(advice) != std::string::npos);
    EXPECT_TRUE(said.find("too old") == std::string::npos && said.find("device=\"cpu\"") != std::string::npos);
  }
}

TEST(cuda, an_index_that_is_not_there) {
  if (!available()) return;
  EXPECT_THROW_WITH(make_cuda_device(device_count()), InvalidArgument, "expected one of cuda:0 to");
  EXPECT_THROW(make_cuda_device(-1), InvalidArgument);
}

}  // namespace
}  // namespace zcomm::device::cuda
