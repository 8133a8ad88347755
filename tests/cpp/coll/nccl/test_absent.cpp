// Backend nccl without a libnccl or a device: it throws Unsupported and has no other effect.
#include <cstdlib>
#include <string>

#include "coll/cuda/nccl_engine.hpp"
#include "coll/cuda/nccl_library.hpp"
#include "coll/support/comm_world.hpp"
#include "device/cuda/cuda.hpp"
#include "test.hpp"

namespace zcomm::coll {
namespace {

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Unsupported& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(nccl, a_library_that_is_not_there_is_named) {
  setenv("ZCOMM_NCCL_LIB", "/nowhere/libnccl.so.2", 1);
  const std::string message = refusal([] { NcclLibrary::load(""); });
  EXPECT_TRUE(message.find("/nowhere/libnccl.so.2") != std::string::npos);
  EXPECT_TRUE(message.find("ZCOMM_NCCL_LIB") != std::string::npos);
}

TEST(nccl, another_library_lacks_its_functions) {
  setenv("ZCOMM_NCCL_LIB", "libm.so.6", 1);
  const std::string message = refusal([] { NcclLibrary::load(""); });
  EXPECT_TRUE(message.find("libm.so.6 has no nccl") != std::string::npos);
}

TEST(nccl, a_communicator_is_refused_and_its_host_side_stays_usable) {
  if (device::cuda::available()) return;
  setenv("ZCOMM_NCCL_LIB", "/nowhere/libnccl.so.2", 1);
  test::run_world(2, test::small_slots(), [](test::Rank& self) {
    const NcclHosts hosts{*self.comm, *self.comm};
    EXPECT_THROW(make_nccl_communicator(hosts, self.mesh, 0, "", {.timeout_s = 5.0}), Unsupported);
    self.comm->barrier(kBlocking);
  });
}

TEST(nccl, names_of_types_and_reductions) {
  EXPECT_EQ(nccl_dtype(DType::float32), 7);
  EXPECT_EQ(nccl_dtype(DType::bfloat16), 9);
  EXPECT_EQ(nccl_dtype(DType::int64), 4);
  EXPECT_EQ(nccl_dtype(DType::boolean), nccl_dtype(DType::uint8));
  EXPECT_EQ(nccl_op(ReduceOp::avg, DType::float32), 4);
  EXPECT_EQ(nccl_op(ReduceOp::sum, DType::boolean), nccl_op(ReduceOp::max, DType::uint8));
  EXPECT_EQ(nccl_op(ReduceOp::prod, DType::boolean), nccl_op(ReduceOp::min, DType::uint8));
}

}  // namespace
}  // namespace zcomm::coll
