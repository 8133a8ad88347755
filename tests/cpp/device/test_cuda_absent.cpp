// The accelerator where there is none: says so, and nothing crashes.
#include <array>

#include "device/cuda.hpp"
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
  EXPECT_THROW(Stream stream(0), Unsupported);
  EXPECT_THROW(Event event(0), Unsupported);
}

}  // namespace
}  // namespace zcomm::device::cuda
