// Backend nccl and calls that it refuses, or that differ between ranks: these start, are found behind, and end.
#include "coll/support/error_checks.hpp"
#include "coll/support/nccl_world.hpp"

using namespace zcomm;
using namespace zcomm::test;
using namespace zcomm::test::calls;

namespace {

/// The call, and the wait until ranks have compared it. Its own kernels may end well.
CommCall verified(const CommCall& call) {
  return [=](Communicator& comm) {
    call(comm);
    comm.verify(false);
  };
}

/// Rank `odd` of 3 calls `other`, the rest `usual`.
void expect_mismatch(int odd, const CommCall& usual, const CommCall& other, std::initializer_list<std::string> parts) {
  FakeNccl fake;
  fake.let_calls_differ();
  const auto run = [&](const std::function<void(Rank&)>& body) {
    run_nccl_world(3, {}, [&](NcclRank& self) {
      body(self);
      expect_aborted(fake, self);
    });
  };
  test::expect_mismatch(run, odd, verified(usual), verified(other), parts);
}

CommCall exchange(std::size_t to_next, DType dtype = DType::float32) {
  return [=](Communicator& comm) {
    std::vector<ConstBuffer> in(3, {data, 5});
    std::vector<Buffer> out = buffers_at(data + 1000, 3, 5);
    in[static_cast<std::size_t>((comm.rank() + 1) % 3)].count = to_next;
    comm.all_to_all(in, out, dtype).wait();
  };
}

}  // namespace

TEST(nccl_refusals, mismatches_name_both_sides) {
  expect_mismatch(1, all_reduce(1024), all_reduce(2048),
                  {"rank 0, 2", "all_reduce float32 sum count=1024 'g'", "rank 1", "count=2048 'g'"});
  expect_mismatch(2, all_reduce(64, DType::float32), all_reduce(64, DType::int32), {"float32", "int32"});
  expect_mismatch(2, all_reduce(64), all_reduce(64, DType::float32, ReduceOp::max), {"sum", "max"});
  expect_mismatch(0, all_reduce(64), all_reduce(64, DType::float32, ReduceOp::sum, "h"), {"'g'", "'h'"});
  expect_mismatch(0, all_reduce(64), [](Communicator& comm) { comm.barrier("b").wait(); }, {"rank 0: barrier", "'b'"});
  expect_mismatch(1, broadcast(0), broadcast(2), {"root=0", "root=2"});
}

TEST(nccl_refusals, long_descriptions_are_given_in_full) {
  FakeNccl fake;
  fake.let_calls_differ();
  run_nccl_world(2, {}, [&](NcclRank& self) {
    const std::size_t last = self.rank == 0 ? 60 : 50;
    const std::string message =
        message_of<CollectiveMismatch>([&] { all_reduce_list({1, 2, 3, last, 110 - last})(*self.comm); }, "layout");
    expect_contains(message, {"rank 0: ", "rank 1: ", "count=116 in 5 buffers [1, 2, 3, " + std::to_string(last),
                              "; layout ", "'list'"});
    expect_aborted(fake, self);
  });
}

TEST(nccl_refusals, what_is_exchanged_must_be_what_is_expected) {
  expect_mismatch(1, exchange(5), exchange(7), {"rank 1 sends 7 elements to rank 2, which expects 5"});
  expect_mismatch(1, exchange(5), exchange(5, DType::int64), {"float32", "int64"});
  expect_mismatch(0, exchange(5), all_reduce(64), {"all_to_all", "all_reduce"});
}

TEST(nccl_refusals, they_leave_it_usable) {
  FakeNccl fake;
  run_nccl_world(2, {}, [](NcclRank& self) {
    Communicator& comm = *self.comm;
    std::vector<float> values(16, 1);
    const Buffer all{values.data(), 8}, null{nullptr, 3}, part{values.data() + 8, 4};
    const ConstBuffer in{values.data(), 8};
    const OwnPart own{0, 1, values.data() + 15};
    const auto scatter = [&](DType dtype, DType out_dtype, bool accumulate, std::span<const OwnPart> parts = {}) {
      comm.reduce_scatter({&in, 1}, {&part, 1}, dtype, ReduceOp::sum, out_dtype, accumulate, {}, parts).wait();
    };
    EXPECT_THROW_WITH(comm.all_reduce({&null, 1}, DType::float32, ReduceOp::sum), InvalidArgument, "null");
    EXPECT_THROW_WITH(comm.allocate(64), Unsupported, "nccl");
    EXPECT_THROW_WITH(comm.allocate_shared(64), Unsupported, "nccl");
    EXPECT_THROW_WITH(comm.duplicate(), Unsupported, "nccl");
    EXPECT_THROW_WITH(scatter(DType::float32, DType::float32, false, {&own, 1}), Unsupported, "own parts");
    comm.all_reduce({&all, 1}, DType::float32, ReduceOp::sum).wait();
    EXPECT_EQ(values[7], 2.0f);
  });
}

TEST(nccl_refusals, rank_order_of_another_operation_than_reduce_scatter) {
  FakeNccl fake;
  run_nccl_world(3, {}, [](NcclRank& self) {
    std::vector<float> values(12, 1), part(4);
    const ConstBuffer in{values.data(), 12};
    const Buffer out{part.data(), 4}, all{values.data(), 12};
    Call call;
    call.order = ReduceOrder::rank;
    self.comm->reduce_scatter({&in, 1}, {&out, 1}, DType::float32, ReduceOp::sum, DType::float32, false, call).wait();
    EXPECT_TRUE(part == std::vector<float>(4, 3));
    EXPECT_THROW_WITH(self.comm->all_reduce({&all, 1}, DType::float32, ReduceOp::sum, call).wait(), Unsupported,
                      "use reduce_scatter and all_gather");
  });
}
