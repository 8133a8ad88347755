// Backend nccl when NCCL or a device fails: CudaError with NCCL's text, the call and the operation, and PeerLost on the
// other ranks.
#include "coll/support/error_checks.hpp"
#include "coll/support/nccl_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

/// One that calls that function of NCCL, in a world of one rank.
struct Failing {
  const char* call;
  std::function<Work(Communicator&, std::span<const ConstBuffer>, std::span<const Buffer>)> operation;
  const char* words;
};

std::vector<Failing> all_calls() {
  using In = std::span<const ConstBuffer>;
  using Out = std::span<const Buffer>;
  const auto all_reduce = [](Communicator& comm, In, Out out) {
    return comm.all_reduce(out, DType::float32, ReduceOp::sum, "grads");
  };
  const char* const reduced = "all_reduce float32 sum count=8 'grads'";
  return {
      {"ncclGroupStart", all_reduce, reduced},
      {"ncclAllReduce", all_reduce, reduced},
      {"ncclGroupEnd", all_reduce, reduced},
      {"ncclCommGetAsyncError", all_reduce, reduced},
      {"ncclReduce", [](Communicator& comm, In, Out out) { return comm.reduce(out, DType::float32, ReduceOp::sum, 0); },
       "reduce float32 sum root=0 count=8"},
      {"ncclAllGather", [](Communicator& comm, In in, Out out) { return comm.all_gather(in, out, DType::float32); },
       "all_gather float32 count=8"},
      {"ncclBroadcast", [](Communicator& comm, In, Out out) { return comm.broadcast(out, DType::float32, 0); },
       "broadcast float32 root=0 count=8"},
      {"ncclSend", [](Communicator& comm, In in, Out out) { return comm.gather(in, out, DType::float32, 0); },
       "gather float32 root=0 count=8"},
      {"ncclRecv", [](Communicator& comm, In in, Out out) { return comm.all_to_all(in, out, DType::float32); },
       "all_to_all float32"}};
}

}  // namespace

TEST(nccl_errors, what_nccl_refuses_is_an_error_in_its_words) {
  for (const Failing& failing : all_calls()) {
    FakeNccl fake;
    run_nccl_world(1, {}, [&](NcclRank& self) {
      std::vector<float> values(16, 1);
      const ConstBuffer in{values.data(), 8};
      const Buffer out{values.data() + 8, 8};
      fake.fail(0, failing.call, FakeNccl::invalid_usage);
      const auto call = [&] { failing.operation(*self.comm, {&in, 1}, {&out, 1}).wait(); };
      expect_contains(message_of<CudaError>(call, failing.call),
                      {failing.words, failing.call, "invalid usage", "last words"});
      expect_aborted(fake, self);
    });
  }
}

TEST(nccl_errors, an_error_while_kernels_run) {
  FakeNccl fake;
  fake.hold_kernels(0);
  run_nccl_world(1, {}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    Work work = sum(self, values, "late");
    fake.wait_for_kernel(0);
    fake.break_down(0, FakeNccl::system_error);
    expect_contains(message_of<CudaError>([&] { work.wait(); }, "asynchronous"),
                    {"all_reduce float32 sum count=100 'late'", "unhandled system error", "last words"});
    expect_aborted(fake, self);
  });
}

TEST(nccl_errors, calls_behind_a_failure_fail_with_it) {
  FakeNccl fake;
  fake.hold_kernels(0);
  run_nccl_world(1, {}, [&](NcclRank& self) {
    std::vector<float> values(8, 1);
    std::vector<Work> works;
    for (int i = 0; i < 5; ++i) works.push_back(sum(self, values));
    fake.wait_for_kernel(0);
    fake.break_down(0, FakeNccl::invalid_argument);
    for (Work& work : works) EXPECT_THROW_WITH(work.wait(), CudaError, ": invalid argument");
    expect_aborted(fake, self);
  });
}

TEST(nccl_errors, a_lost_device) {
  for (std::uint64_t n = 1; n <= 4; ++n) {  // the call's event, the stream's wait, the kernel, the end
    FakeNccl fake;
    run_nccl_world(1, {}, [&](NcclRank& self) {
      std::vector<float> values(8, 1);
      self.device->lose_after(n);
      expect_contains(message_of<CudaError>([&] { sum(self, values).wait(); }, "lost"),
                      {n == 3 ? "unhandled cuda error" : "simulated:0"});
      expect_aborted(fake, self);
    });
  }
}
