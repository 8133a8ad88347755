// The life of a communicator of backend nccl: begun by all ranks, ended by finalize and destroy, or by one abort.
#include <chrono>
#include <future>
#include <string>
#include <thread>

#include "coll/support/error_checks.hpp"
#include "coll/support/nccl_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

using CallCounts = FakeNccl::CallCounts;

const NcclWorldOptions kByHand{.connect = false};

}  // namespace

TEST(nccl_life, a_good_end_finalizes_and_destroys) {
  for (const int queries : {0, 3}) {
    FakeNccl fake;
    fake.be_slow(queries);
    run_nccl_world(3, {}, [&](NcclRank& self) {
      std::vector<float> values(10, 1);
      sum(self, values).wait();
      sum(self, values);
      self.comm->close();
      EXPECT_EQ(values[9], 9.0f);
      EXPECT_TRUE(fake.call_counts(self.rank) == (CallCounts{.inits = 1, .groups = 2, .finalized = 1, .destroyed = 1}));
    });
  }
}

TEST(nccl_life, an_end_that_fails_aborts) {
  for (const int how : {0, 1, 2}) {
    FakeNccl fake;
    if (how == 0) fake.fail(0, "ncclCommFinalize", FakeNccl::system_error);
    if (how == 1) fake.hold_finalize(0);
    run_nccl_world(1, {.timeout_s = 0.1}, [&](NcclRank& self) {
      std::vector<float> values(10, 1);
      sum(self, values).wait();
      if (how == 2) fake.break_down(0, FakeNccl::remote_error);
      self.comm->close();
      EXPECT_TRUE(fake.call_counts(0) ==
                  (CallCounts{.inits = 1, .groups = 1, .finalized = how == 0 ? 0 : 1, .destroyed = 0, .aborted = 1}));
    });
  }
}

TEST(nccl_life, a_beginning_that_fails) {
  for (const std::string call : {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommGetAsyncError"}) {
    FakeNccl fake;
    fake.fail(0, call, FakeNccl::system_error);
    run_nccl_world(1, kByHand, [&](NcclRank& self) {
      expect_contains(message_of<CudaError>([&] { self.connect(); }, call.c_str()),
                      {"init of NCCL", call, "unhandled system error", "last words"});
      self.connect();  // the failure concerned one call
    });
  }
}

TEST(nccl_life, a_beginning_that_fails_on_another_rank) {
  for (const std::string call : {"ncclGetUniqueId", "ncclCommInitRankConfig"}) {
    FakeNccl fake;
    fake.fail(0, call, FakeNccl::system_error);
    run_nccl_world(2, {.timeout_s = 0.15, .connect = false}, [&](NcclRank& self) {
      if (self.rank == 0)
        EXPECT_THROW(self.connect(), CudaError);
      else if (call == "ncclGetUniqueId")
        expect_lost(0, "left", [&] { self.connect(); });
      else
        EXPECT_THROW_WITH(self.connect(), Timeout, "rank 0 has left meanwhile");
    });
  }
}

TEST(nccl_life, a_rank_that_does_not_come) {
  for (const bool dies : {false, true}) {
    FakeNccl fake;
    std::promise<void> given_up;
    run_nccl_world(2, {.timeout_s = 0.15, .connect = false}, [&](NcclRank& self) {
      if (self.rank == 1) {  // takes part only in the host's steps
        coll::NcclId id{};
        const Buffer buffer{id.bytes.data(), id.bytes.size()};
        self.control->broadcast({&buffer, 1}, DType::uint8, 0, Call("NCCL's unique id", false));
        if (dies) self.mesh->drop_dead();
        return given_up.get_future().wait();
      }
      if (dies)
        EXPECT_THROW_WITH(self.connect(), PeerLost, "rank 1 died; init of NCCL");
      else
        EXPECT_THROW_WITH(self.connect(), Timeout, "init of NCCL: rank 0 waited 0.15 s");
      EXPECT_TRUE(fake.call_counts(0) == (CallCounts{.inits = 1, .aborted = 1}));
      given_up.set_value();
    });
  }
}

TEST(nccl_life, its_clock_starts_when_all_ranks_have_come) {
  FakeNccl fake;
  fake.delay_init(1, 0.1);
  run_nccl_world(2, {.timeout_s = 0.2, .connect = false}, [](NcclRank& self) {
    if (self.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    self.connect();
  });
}

TEST(nccl_life, a_deadline_is_that_of_one_call) {
  FakeNccl fake;
  run_nccl_world(1, {.timeout_s = 0.05}, [](NcclRank& self) {
    std::vector<float> values(10, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    sum(self, values).wait();
  });
}

TEST(nccl_life, a_deadline_may_be_suspended) {
  FakeNccl fake;
  std::promise<void> seen;
  run_nccl_world(2, {.timeout_s = 0.1}, [&](NcclRank& self) {
    std::vector<float> values(10, 1);
    const auto stream = self.device->make_stream();
    Call call;
    call.stream = handle_of(*stream);
    self.comm->suspend_deadline();
    self.comm->suspend_deadline();
    self.comm->resume_deadline();
    put(*stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(120)); });
    sum(self, values, call).wait();
    stream->synchronize();
    EXPECT_EQ(values[0], 2.0f);
    self.comm->resume_deadline();
    if (self.rank == 1) return seen.get_future().wait();
    EXPECT_THROW_WITH(sum(self, values).wait(), Timeout, "rank 1");
    seen.set_value();
  });
}
