// Backend nccl when a rank dies, leaves, hangs or is closed: the error names rank and cause, and no rank waits for
// ever.
#include <algorithm>
#include <atomic>
#include <future>

#include "base/interrupt.hpp"
#include "coll/support/error_checks.hpp"
#include "coll/support/nccl_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

/// Waits until all others have reported that they are done.
class Survivors {
 public:
  explicit Survivors(int count) : left_(count) {}
  void done() {
    if (left_.fetch_sub(1) == 1) all_.set_value();
  }
  void wait() { all_.get_future().wait(); }

 private:
  std::atomic<int> left_;
  std::promise<void> all_;
};

/// all_to_all of one element between the ranks of each pair, in both directions.
class Pairs {
 public:
  Pairs(NcclRank& self, std::vector<std::pair<int, int>> pairs) {
    const auto ranks = static_cast<std::size_t>(self.world);
    for (int rank = 0; rank < self.world; ++rank) {
      const bool meets = std::ranges::any_of(pairs, [&](const auto& pair) {
        return pair == std::pair(self.rank, rank) || pair == std::pair(rank, self.rank);
      });
      in_.push_back({values_.data() + rank, meets ? 1u : 0u});
      out_.push_back({values_.data() + ranks + static_cast<std::size_t>(rank), meets ? 1u : 0u});
    }
  }
  Work exchange(NcclRank& self, const Call& call = {}) {
    return self.comm->all_to_all(in_, out_, DType::float32, call);
  }

 private:
  std::vector<float> values_ = std::vector<float>(16, 1);
  std::vector<ConstBuffer> in_;
  std::vector<Buffer> out_;
};

}  // namespace

TEST(nccl_losses, a_rank_that_has_died_before) {
  FakeNccl fake;
  Survivors survivors(2);
  run_nccl_world(3, {}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    sum(self, values).wait();
    if (self.rank == 1) {
      self.mesh->drop_dead();
      return survivors.wait();
    }
    expect_lost(1, "died", [&] { sum(self, values).wait(); });
    expect_aborted(fake, self);
    survivors.done();
  });
}

/// Rank 2 has nothing to do with the others, and leaves in order; then rank 1 dies.
TEST(nccl_losses, a_rank_that_dies_while_kernels_run) {
  FakeNccl fake;
  fake.hold_kernels(1);
  Survivors survivors(1);
  std::promise<void> left;
  run_nccl_world(3, {.timeout_s = 1.5}, [&](NcclRank& self) {
    Pairs pairs(self, {{0, 1}, {2, 2}});
    Work work = pairs.exchange(self);
    if (self.rank == 2) {
      work.wait();
      self.comm->close();
      self.mesh->leave();
      return left.set_value();
    }
    if (self.rank == 1) {
      left.get_future().wait();
      fake.wait_for_kernel(1);
      self.mesh->drop_dead();
      survivors.wait();
      self.comm->close();
      EXPECT_THROW_WITH(work.wait(), Error, "closed");
      return;
    }
    expect_lost(1, "died", [&] { work.wait(); });
    expect_aborted(fake, self);
    survivors.done();
  });
}

TEST(nccl_losses, a_rank_that_has_done_its_part_may_die) {
  FakeNccl fake;
  std::promise<void> called, dead;
  Survivors survivors(1);
  run_nccl_world(2, {}, [&](NcclRank& self) {
    Pairs pairs(self, {{0, 0}});
    const auto stream = self.device->make_stream();
    Call call;
    call.stream = handle_of(*stream);
    if (self.rank == 0) put(*stream, [&] { dead.get_future().wait(); });
    Work work = pairs.exchange(self, call);
    if (self.rank == 1) {
      work.wait();
      called.get_future().wait();
      self.mesh->drop_dead();
      return survivors.wait();
    }
    EXPECT_TRUE(work.wait_for(10));
    called.set_value();
    while (!self.mesh->lost()) EXPECT_FALSE(work.done());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(work.done());
    dead.set_value();
    work.wait();
    survivors.done();
  });
}

/// If only one rank fails, the others are told why, although their own calls end.
TEST(nccl_losses, a_rank_that_has_failed_tells_why) {
  FakeNccl fake;
  Survivors survivors(1);
  fake.fail(1, "ncclGroupEnd", FakeNccl::invalid_usage);
  run_nccl_world(2, {}, [&](NcclRank& self) {
    Pairs pairs(self, {{0, 0}, {1, 1}});
    if (self.rank == 1) {
      EXPECT_THROW(pairs.exchange(self).wait(), CudaError);
      return survivors.wait();
    }
    pairs.exchange(self).wait();
    expect_contains(message_of<Error>([&] { self.comm->verify(false); }, "told"),
                    {"rank 1 failed: all_to_all float32", "invalid usage"});
    survivors.done();
  });
}

/// Its kernels show it before its sockets end. That rank 2 has left is not why.
TEST(nccl_losses, a_rank_whose_death_nccl_notices_first) {
  FakeNccl fake;
  fake.hold_kernels(1);
  Survivors survivors(1);
  std::promise<void> left;
  run_nccl_world(3, {.timeout_s = 1.5}, [&](NcclRank& self) {
    Pairs pairs(self, {{0, 1}, {2, 2}});
    Work work = pairs.exchange(self);
    if (self.rank == 2) {
      work.wait();
      self.comm->close();
      self.mesh->leave();
      return left.set_value();
    }
    if (self.rank == 1) {
      left.get_future().wait();
      fake.wait_for_kernel(0);
      fake.break_down(0, FakeNccl::remote_error);
      self.mesh->drop_dead();
      survivors.wait();
      self.comm->close();
      EXPECT_THROW_WITH(work.wait(), Error, "closed");
      return;
    }
    expect_lost(1, "died", [&] { work.wait(); });
    expect_aborted(fake, self);
    survivors.done();
  });
}

TEST(nccl_losses, a_kernel_that_never_ends) {
  FakeNccl fake;
  fake.hold_kernels(1);
  run_nccl_world(2, {.timeout_s = 0.1}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    const std::string message = message_of<Timeout>([&] { sum(self, values, "stuck").wait(); }, "stuck");
    expect_contains(message, {"all_reduce float32 sum count=100 'stuck'", "waited 0.1 s", "all ranks have called it"});
    expect_aborted(fake, self);
  });
}

TEST(nccl_losses, a_rank_that_is_late_is_named) {
  FakeNccl fake;
  Survivors survivors(1);
  run_nccl_world(2, {.timeout_s = 0.1}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    if (self.rank == 1) {
      survivors.wait();
      EXPECT_THROW(sum(self, values).wait(), Timeout);
    } else {
      expect_contains(
          message_of<Timeout>([&] { sum(self, values, "grads").wait(); }, "late"),
          {"all_reduce float32 sum count=100 'grads'", "for rank 1 to call it; rank 1 has called nothing yet"});
      survivors.done();
    }
    expect_aborted(fake, self);
  });
}

TEST(nccl_losses, a_failure_ends_kernels_that_wait_for_that_rank) {
  FakeNccl fake;
  fake.fail(1, "ncclGroupEnd", FakeNccl::invalid_usage);
  run_nccl_world(2, {}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    if (self.rank == 1)
      EXPECT_THROW(sum(self, values).wait(), CudaError);
    else
      EXPECT_THROW_WITH(sum(self, values).wait(), Error, "rank 1 failed: all_reduce float32 sum count=100");
    expect_aborted(fake, self);
  });
}

/// Over a network NCCL finds that another rank has aborted; that rank tells why.
TEST(nccl_losses, nccl_notices_a_failure_first) {
  FakeNccl fake;
  fake.hold_kernels(1);
  run_nccl_world(2, {}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    if (self.rank == 0) {
      EXPECT_THROW_WITH(sum(self, values).wait(), Error,
                        "rank 1 failed: all_reduce float32 sum count=100: its kernels: unhandled system");
    } else {
      Work work = sum(self, values);
      EXPECT_TRUE(work.wait_for(5));
      fake.wait_for_kernel(0);
      fake.break_down(0, FakeNccl::remote_error);
      fake.break_down(1, FakeNccl::system_error);
      EXPECT_THROW(work.wait(), CudaError);
    }
    expect_aborted(fake, self);
  });
}

TEST(nccl_losses, a_network_error_with_nobody_lost) {
  FakeNccl fake;
  fake.hold_kernels(0);
  run_nccl_world(1, {.timeout_s = 0.1}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    Work work = sum(self, values);
    fake.wait_for_kernel(0);
    fake.break_down(0, FakeNccl::remote_error);
    EXPECT_THROW_WITH(work.wait(), CudaError, "remote process exited or there was a network error: last words");
    expect_aborted(fake, self);
  });
}

/// Calls get a while to end.
TEST(nccl_losses, closing_ends_kernels) {
  FakeNccl fake;
  fake.hold_kernels(0);
  run_nccl_world(2, {.timeout_s = 0.4}, [&](NcclRank& self) {
    Pairs pairs(self, {{0, 0}});
    Work work = pairs.exchange(self);
    if (self.rank == 1) return work.wait();
    Work behind = pairs.exchange(self);
    EXPECT_TRUE(behind.wait_for(10));
    std::thread([&] { self.comm->close(); }).join();
    EXPECT_THROW_WITH(work.wait(), Error, "closed while all_to_all");
    EXPECT_THROW(behind.wait(), Error);
    EXPECT_TRUE(fake.call_counts(0) == (FakeNccl::CallCounts{.inits = 1, .groups = 2, .aborted = 1}));
    EXPECT_THROW_WITH(pairs.exchange(self), Error, "closed");
  });
}

TEST(nccl_losses, closing_ends_calls_that_another_rank_does_not_make) {
  FakeNccl fake;
  Survivors survivors(1);
  run_nccl_world(2, {.timeout_s = 0.4}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    if (self.rank == 1) return survivors.wait();
    Work work = sum(self, values), behind = sum(self, values);
    EXPECT_TRUE(behind.wait_for(10));
    EXPECT_FALSE(work.done());
    std::thread([&] { self.comm->close(); }).join();
    EXPECT_THROW_WITH(work.wait(), Error, "closed while");
    EXPECT_THROW(behind.wait(), Error);
    EXPECT_TRUE(fake.call_counts(0) == (FakeNccl::CallCounts{.inits = 1, .groups = 2, .aborted = 1}));
    survivors.done();
  });
}

TEST(nccl_losses, an_interrupt_ends_a_wait_for_kernels) {
  static std::atomic<bool> interrupted;
  interrupted = false;
  set_interrupt_check([] {
    if (interrupted) throw Interrupted();
  });
  {
    FakeNccl fake;
    fake.hold_kernels(0);
    run_nccl_world(1, {}, [&](NcclRank& self) {
      std::vector<float> values(100, 1);
      std::thread impatient([&] {
        fake.wait_for_kernel(0);
        interrupted = true;
      });
      EXPECT_THROW(sum(self, values, kBlocking), Interrupted);
      impatient.join();
      interrupted = false;
      expect_aborted(fake, self);
    });
  }
  set_interrupt_check(nullptr);
}
