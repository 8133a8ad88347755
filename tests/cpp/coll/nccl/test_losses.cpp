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
  run_nccl_world(3, {}, [&](NcclRank& self) {
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
  std::promise<void> dead;
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
      self.mesh->drop_dead();
      return survivors.wait();
    }
    while (!self.mesh->lost()) EXPECT_FALSE(work.wait_for(0.005));
    EXPECT_FALSE(work.wait_for(0.02));
    dead.set_value();
    work.wait();
    survivors.done();
  });
}

/// If only one rank fails, the others do not wait for it before their next call, although it has not closed yet.
TEST(nccl_losses, a_rank_that_has_failed_is_not_waited_for) {
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
    expect_lost(1, "left", [&] { pairs.exchange(self).wait(); });
    survivors.done();
  });
}

/// Its kernels show it before its sockets end. That rank 2 has left is not why.
TEST(nccl_losses, a_rank_whose_death_nccl_notices_first) {
  FakeNccl fake;
  fake.hold_kernels(1);
  Survivors survivors(1);
  std::promise<void> left;
  run_nccl_world(3, {}, [&](NcclRank& self) {
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
      EXPECT_FALSE(work.wait_for(0.02));
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
    expect_contains(message, {"all_reduce float32 sum count=100 'stuck'", "waited 0.1 s",
                              "rank " + std::to_string(self.rank), "all ranks have entered it"});
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
      expect_contains(message_of<Timeout>([&] { sum(self, values, "grads").wait(); }, "late"),
                      {"all_reduce float32 sum count=100 'grads'", "for rank 1 to enter it"});
      survivors.done();
    }
    expect_aborted(fake, self);
  });
}

TEST(nccl_losses, a_rank_that_left_is_named_when_the_deadline_passes) {
  FakeNccl fake;
  fake.fail(1, "ncclGroupEnd", FakeNccl::invalid_usage);
  run_nccl_world(2, {.timeout_s = 0.15}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    if (self.rank == 1)
      EXPECT_THROW(sum(self, values).wait(), CudaError);
    else
      EXPECT_THROW_WITH(sum(self, values).wait(), Timeout, "rank 1 has left meanwhile");
    expect_aborted(fake, self);
  });
}

/// Over a network NCCL finds that another rank has aborted.
TEST(nccl_losses, a_rank_that_left_is_named_when_nccl_notices) {
  FakeNccl fake;
  fake.hold_kernels(1);
  run_nccl_world(2, {.timeout_s = 0.15}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    if (self.rank == 0) {
      expect_lost(1, "left", [&] { sum(self, values).wait(); });
    } else {
      Work work = sum(self, values);
      fake.wait_for_kernel(0);
      fake.break_down(1, FakeNccl::system_error);
      EXPECT_THROW(work.wait(), CudaError);
      fake.break_down(0, FakeNccl::remote_error);
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

TEST(nccl_losses, closing_ends_a_wait_for_kernels) {
  FakeNccl fake;
  fake.hold_kernels(0);
  run_nccl_world(2, {}, [&](NcclRank& self) {
    Pairs pairs(self, {{0, 0}});
    Work work = pairs.exchange(self);
    if (self.rank == 1) return work.wait();
    Work behind = pairs.exchange(self);
    fake.wait_for_kernel(0);
    std::thread([&] { self.comm->close(); }).join();
    EXPECT_THROW_WITH(work.wait(), Error, "closed while all_to_all");
    EXPECT_THROW(behind.wait(), Error);
    EXPECT_TRUE(fake.call_counts(0) == (FakeNccl::CallCounts{.inits = 1, .groups = 1, .aborted = 1}));
    EXPECT_THROW_WITH(pairs.exchange(self), Error, "closed");
  });
}

TEST(nccl_losses, closing_ends_a_wait_for_another_rank) {
  FakeNccl fake;
  Survivors survivors(1);
  run_nccl_world(2, {}, [&](NcclRank& self) {
    std::vector<float> values(100, 1);
    if (self.rank == 1) return survivors.wait();
    Work work = sum(self, values), behind = sum(self, values);
    EXPECT_FALSE(work.wait_for(0.01));
    std::thread([&] { self.comm->close(); }).join();
    EXPECT_THROW_WITH(work.wait(), Error, "closed while");
    EXPECT_THROW(behind.wait(), Error);
    EXPECT_TRUE(fake.call_counts(0) == (FakeNccl::CallCounts{.inits = 1, .aborted = 1}));
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
