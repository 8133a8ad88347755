// Splitting a communicator of backend nccl: by ncclCommSplit, in the order of its calls, if all ranks' NCCL has it.
#include <string>
#include <vector>

#include "coll/support/error_checks.hpp"
#include "coll/support/nccl_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

/// This rank's part by ncclCommSplit; the ranks' hosts are split by hand, into the ranks of one color.
std::shared_ptr<coll::NcclComm> split(NcclRank& self, int color, int key) {
  std::shared_ptr<coll::NcclComm> part;
  EXPECT_TRUE(self.comm->split_devices(color, key, &part));
  return part;
}

}  // namespace

TEST(nccl_split, a_part_has_its_own_calls) {
  for (const int queries : {0, 3}) {
    FakeNccl fake;
    fake.be_slow(queries);
    run_nccl_world(2, {.max_delay_s = 0.002}, [&](NcclRank& self) {
      std::vector<float> values(10, 1);
      Work pending = sum(self, values);  // the split waits for it
      auto joined = split(self, 0, 1 - self.rank);
      EXPECT_TRUE(joined != nullptr);
      const auto hosts = self.control->duplicate(), guard = self.control->duplicate();
      const auto part = coll::make_nccl_communicator({*hosts, *guard, nullptr, std::move(joined)}, self.mesh,
                                                     self.device, FakeNccl::library(), self.options);
      const Buffer buffer{values.data(), values.size()};
      part->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, {}).wait();
      part->close();
      pending.wait();
      std::vector<float> more(10, 1);
      sum(self, more).wait();
      self.comm->close();
      EXPECT_EQ(values[9], 4.0f);
      EXPECT_EQ(more[9], 2.0f);
    });
    EXPECT_EQ(fake.made().first, 2);
    EXPECT_EQ(fake.made().second, 2);
  }
}

TEST(nccl_split, a_rank_without_a_color_has_no_part) {
  FakeNccl fake;
  run_nccl_world(3, {}, [&](NcclRank& self) {
    const auto joined = split(self, self.rank == 1 ? -1 : 0, self.rank);
    EXPECT_EQ(joined == nullptr, self.rank == 1);
  });
  EXPECT_EQ(fake.made().second, 2);
}

TEST(nccl_split, an_older_nccl_cannot) {
  FakeNccl fake;
  run_nccl_world(2, {.has_split = false}, [&](NcclRank& self) {
    std::shared_ptr<coll::NcclComm> part;
    EXPECT_TRUE(!self.comm->split_devices(0, 0, &part));
    EXPECT_TRUE(part == nullptr);
  });
  EXPECT_EQ(fake.made().second, 0);
}

TEST(nccl_split, a_failure_ends_the_communicator_on_all_ranks) {
  FakeNccl fake;
  fake.fail(0, "ncclCommSplit", FakeNccl::system_error);
  run_nccl_world(2, {}, [&](NcclRank& self) {
    std::shared_ptr<coll::NcclComm> part;
    if (self.rank == 0)
      expect_contains(message_of<CudaError>([&] { self.comm->split_devices(0, 0, &part); }, "split"),
                      {"ncclCommSplit", "unhandled system error", "split of devices"});
    else
      EXPECT_THROW_WITH(self.comm->split_devices(0, 0, &part), Error, "rank 0");
    std::vector<float> values(4);
    EXPECT_THROW_WITH(sum(self, values).wait(), Error, "unusable since");
  });
}

TEST(nccl_split, ranks_that_call_something_else_are_named) {
  FakeNccl fake;
  run_nccl_world(2, {.timeout_s = 5}, [&](NcclRank& self) {
    std::shared_ptr<coll::NcclComm> part;
    if (self.rank == 0)
      EXPECT_THROW(self.comm->split_devices(0, 0, &part), Error);
    else
      EXPECT_THROW(self.comm->barrier(Call("", false)), Error);
  });
}
