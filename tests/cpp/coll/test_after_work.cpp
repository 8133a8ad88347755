// Communicator::after(Work): collectives that start when an operation of another communicator has ended.
#include <sys/wait.h>
#include <unistd.h>

#include <latch>

#include "coll/support/chain_world.hpp"
#include "coll/support/device_world.hpp"
#include "coll/support/error_checks.hpp"
#include "coll/support/hierarchical_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

Work sum_over(Communicator& comm, std::vector<std::int64_t>& values) {
  const Buffer buffer{values.data(), values.size()};
  return comm.all_reduce({&buffer, 1}, DType::int64, ReduceOp::sum);
}

/// Two communicators over the same ranks.
struct Pair {
  std::unique_ptr<Communicator> first, second;
};

void run_pairs(int world, double timeout_s, const std::function<void(Rank&, Pair&)>& body) {
  run_world(world, small_slots(timeout_s), [&](Rank& self) {
    Pair pair{std::move(self.comm), nullptr};
    pair.second = pair.first->duplicate();
    body(self, pair);
    pair.first->close();
    pair.second->close();
  });
}

}  // namespace

TEST(comm_after_work, the_second_sum_reads_the_result_of_the_first) {
  run_chains(2, 2, 30, [](ChainRank& self) {
    std::vector<std::vector<std::int64_t>> buckets(6, std::vector<std::int64_t>(3000, self.rank + 1));
    std::vector<Work> works;
    for (auto& bucket : buckets) {
      works.push_back(sum_over(*self.inside, bucket));
      works.push_back(self.across->after(works.back()));
      works.push_back(sum_over(*self.across, bucket));
    }
    for (Work& work : works) work.wait();
    for (const auto& bucket : buckets) EXPECT_TRUE(bucket == std::vector<std::int64_t>(3000, 10));
  });
}

TEST(comm_after_work, it_does_not_block_and_is_local) {
  std::latch queued(2);
  run_pairs(2, 30, [&](Rank& self, Pair& pair) {
    std::vector<std::int64_t> early(100, 1), late(100, self.rank);
    if (self.rank == 0) {  // only this rank makes an entry
      Work first = sum_over(*pair.first, late);
      Work entry = pair.second->after(first);
      Work second = sum_over(*pair.second, early);
      queued.arrive_and_wait();
      EXPECT_FALSE(second.wait_for(0.05));
      EXPECT_FALSE(entry.done());
      second.wait();
      EXPECT_TRUE(first.done() && entry.done());
    } else {
      Work second = sum_over(*pair.second, early);
      queued.arrive_and_wait();
      EXPECT_FALSE(second.wait_for(0.1));
      sum_over(*pair.first, late).wait();
      second.wait();
    }
    EXPECT_TRUE(early == std::vector<std::int64_t>(100, 2));
    EXPECT_TRUE(late == std::vector<std::int64_t>(100, 1));
  });
}

TEST(comm_after_work, of_ended_and_absent_operations_and_of_the_same_communicator) {
  run_pairs(3, 30, [](Rank& self, Pair& pair) {
    std::vector<std::int64_t> values(1000, 1);
    Work ended = sum_over(*pair.first, values);
    ended.wait();
    pair.second->after(ended).wait();
    pair.second->after(ended, kBlocking);
    pair.second->after(Work()).wait();
    Work own = sum_over(*pair.first, values);
    pair.first->after(own);
    sum_over(*pair.first, values).wait();
    EXPECT_TRUE(values == std::vector<std::int64_t>(1000, 27));
    if (self.rank != 2) {  // messages have no order among collectives
      std::int64_t element = self.rank;
      const Buffer to{&element, 1};
      const ConstBuffer from{&element, 1};
      Work message = self.rank == 0 ? pair.first->send({&from, 1}, DType::int64, 1, 7)
                                    : pair.first->recv({&to, 1}, DType::int64, 0, 7);
      pair.first->after(message).wait();
      EXPECT_EQ(element, 0);
    }
    sum_over(*pair.first, values).wait();
  });
}

TEST(comm_after_work, the_awaited_work_may_be_dropped) {
  run_chains(2, 3, 30, [](ChainRank& self) {
    std::vector<std::int64_t> values(3000, 1);
    self.across->after(sum_over(*self.inside, values));  // dropping both waits
    sum_over(*self.across, values).wait();
    EXPECT_TRUE(values == std::vector<std::int64_t>(3000, 6));
  });
}

TEST(comm_after_work, an_operation_on_a_device_counts_when_the_device_has_ended_it) {
  run_device_world(2, {.max_delay_s = 2e-3}, [](DeviceRank& self) {
    const auto host = Communicator::create(self.mesh, small_slots());
    const auto stream = self.device->make_stream(false);
    const device::Memory memory = self.device->allocate(600 * 8);
    auto* const values = static_cast<std::int64_t*>(memory.get());
    const Buffer buffer{values, 600};
    for (int round = 0; round < 10; ++round) {
      stream->fill(values, 0, 600 * 8);
      stream->fill(values, 1, 600);  // 75 elements of 0x0101010101010101
      Call call;
      call.stream = handle_of(*stream);
      Work works[2];
      works[0] = self.comm->all_reduce({&buffer, 1}, DType::int64, ReduceOp::sum, call);
      works[1] = host->after(works[0]);
      if (round % 2 == 0) works[0] = Work();  // then its stream waits for it, and the entry does in any case
      host->all_reduce({&buffer, 1}, DType::int64, ReduceOp::sum).wait();
      EXPECT_EQ(values[0], 4 * 0x0101010101010101);
      EXPECT_EQ(values[74], 4 * 0x0101010101010101);
      host->barrier(kBlocking);
    }
    host->close();
  });
}

TEST(comm_after_work, a_failure_poisons_and_the_other_ranks_get_its_cause) {
  std::latch over(4);
  run_chains(2, 2, 30, [&](ChainRank& self) {
    const int first_here = 2 * self.group();
    self.inside->describe({" [a group]", {first_here, first_here + 1}});
    std::vector<std::int64_t> values(1000, 1), others(1000, 1);
    if (self.rank == 1) {
      self.inside->close();  // rank 0 needs it there; rank 2 does not know it
      EXPECT_THROW_WITH(sum_over(*self.inside, values), Error, "closed");
      self.across->close();
    } else {
      Work first = sum_over(*self.inside, values);
      Work entry = self.across->after(first);
      Work second = sum_over(*self.across, values);
      if (self.rank == 0) {
        EXPECT_THROW_WITH(first.wait(), PeerLost, "rank 1 left");
        try {
          entry.wait();
          fail(__FILE__, __LINE__, "the entry has ended well");
        } catch (const PeerLost& error) {
          EXPECT_EQ(error.rank, -1);  // a rank of the other communicator
          EXPECT_EQ(error.job_rank, 1);
          expect_contains(error.what(), {"after: the operation of another communicator", "failed: rank 1 left"});
        }
        EXPECT_THROW_WITH(second.wait(), PeerLost, "unusable since: after:");
        EXPECT_THROW_WITH(sum_over(*self.across, others), PeerLost, "unusable since: after:");
      } else if (self.rank == 2) {
        EXPECT_THROW_WITH(second.wait(), Error, "rank 0 failed: after: the operation of another communicator");
        EXPECT_THROW_WITH(sum_over(*self.across, others), Error, "rank 1 left");
      } else {
        EXPECT_THROW_WITH(second.wait(), PeerLost, "rank 0 left");  // rank 1 of the world
      }
    }
    over.arrive_and_wait();
  });
}

// Rank 3 calls nothing. Rank 0 waits for rank 2, which waits for rank 3 in the other communicator.
TEST(comm_after_work, a_late_rank_is_named_by_those_that_wait_for_it_indirectly) {
  std::latch over(4);
  run_chains(2, 2, 0.6, [&](ChainRank& self) {
    self.inside->describe({" [group " + std::to_string(self.group()) + "]", {}});
    self.across->describe({" [row " + std::to_string(self.place()) + "]", {}});
    std::vector<std::int64_t> values(1000, 1);
    if (self.rank != 3) {
      if (self.rank < 2) std::this_thread::sleep_for(std::chrono::milliseconds(self.rank == 0 ? 0 : 50));
      Work first = sum_over(*self.inside, values);
      const Work entry = self.across->after(first);
      Work second = sum_over(*self.across, values);
      if (self.rank == 2) {
        EXPECT_THROW_WITH(first.wait(), Timeout, "s for rank 1");
        EXPECT_THROW_WITH(first.wait(), Timeout, " [group 1]");
        EXPECT_THROW_WITH(second.wait(), Timeout, " [row 0]");
      } else if (self.rank == 0) {
        EXPECT_THROW_WITH(second.wait(), Error, "rank 1 failed: after: the operation of another communicator");
        EXPECT_THROW_WITH(second.wait(), Error, "s for rank 1 ");
        EXPECT_THROW_WITH(second.wait(), Error, " [group 1]");
      } else {
        EXPECT_THROW_WITH(second.wait(), Timeout, "s for rank 1 ");
        EXPECT_THROW_WITH(second.wait(), Timeout, " [row 1]");
      }
    }
    over.arrive_and_wait();
  });
}

TEST(comm_after_work, a_rank_that_fails_tells_the_reason) {
  std::latch over(4);
  run_chains(2, 2, 30, [&](ChainRank& self) {
    self.across->describe({" [a row]", {}});
    std::vector<std::int64_t> values(1000, 1);
    sum_over(*self.across, values).wait();
    if (self.rank < 2) {
      EXPECT_THROW_WITH(self.across->fail(""), InvalidArgument, "no reason");
      Work entry = self.across->fail("a drive is full");
      EXPECT_THROW_WITH(entry.wait(), Error, "a drive is full [a row]");
      EXPECT_THROW_WITH(self.across->fail("again"), Error, "unusable since: a drive is full");
    } else {
      EXPECT_THROW_WITH(sum_over(*self.across, values).wait(), Error, "rank 0 failed: a drive is full");
    }
    sum_over(*self.inside, values).wait();
    over.arrive_and_wait();
  });
}

TEST(comm_after_work, ranks_on_all_hosts_get_the_cause) {
  std::latch over(4);
  run_hosts({0, 0, 1, 1}, 30, [&](HierarchicalRank& self) {
    const auto inside = Communicator::create(self.host_mesh, small_slots());
    std::vector<std::int64_t> values(20'000, 1);
    if (self.rank == 1) {
      inside->close();
    } else if (self.rank == 0) {
      Work first = sum_over(*inside, values);
      self.comm->after(first);
      EXPECT_THROW_WITH(sum_over(*self.comm, values).wait(), PeerLost, "after: the operation of another communicator");
    }
    if (self.rank != 0)
      EXPECT_THROW_WITH(sum_over(*self.comm, values).wait(), Error, "rank 0 failed: after: the operation of another");
    over.arrive_and_wait();
    inside->close();
  });
}

TEST(comm_after_work, closing_ends_the_wait) {
  std::latch closed(2);
  run_pairs(2, 600, [&](Rank& self, Pair& pair) {
    std::vector<std::int64_t> values(100, 1);
    if (self.rank == 0) {
      Work first = sum_over(*pair.first, values);  // rank 1 does not call it
      Work entry = pair.second->after(first);
      Work second = pair.second->barrier();
      EXPECT_FALSE(entry.wait_for(0.02));
      pair.second->close();
      EXPECT_THROW_WITH(entry.wait(), Error, "closed before the other communicator's operation");
      EXPECT_THROW(second.wait(), Error);
      EXPECT_THROW_WITH(pair.second->after(first), Error, "is closed");
      pair.first->close();
      EXPECT_THROW(first.wait(), Error);
    }
    closed.arrive_and_wait();
  });
}

TEST(comm_after_work, closing_the_other_communicator_ends_it_with_an_error) {
  run_pairs(1, 600, [](Rank&, Pair& pair) {
    std::vector<std::int64_t> values(100, 1);
    Work first = sum_over(*pair.first, values);
    first.wait();
    pair.first->close();
    pair.second->after(first).wait();
  });
  std::latch closed(2);
  run_pairs(2, 600, [&](Rank& self, Pair& pair) {
    std::vector<std::int64_t> values(100, 1);
    if (self.rank == 0) {
      Work first = sum_over(*pair.first, values);
      Work entry = pair.second->after(first);
      pair.first->close();
      EXPECT_THROW_WITH(entry.wait(), Error, "failed: communicator was closed");
      EXPECT_THROW_WITH(pair.second->barrier(), Error, "unusable since: after:");
    } else {
      EXPECT_THROW_WITH(pair.second->barrier(kBlocking), Error, "rank 0 failed: after:");
    }
    closed.arrive_and_wait();
  });
}

TEST(comm_after_work, giving_up_ends_the_wait) {
  std::latch over(2);
  run_pairs(2, 600, [&](Rank& self, Pair& pair) {
    std::vector<std::int64_t> values(100, 1);
    if (self.rank == 0) {
      Work first = sum_over(*pair.first, values);
      Work entry = pair.second->after(first);
      EXPECT_FALSE(entry.wait_for(0.02));
      entry.give_up();
      EXPECT_THROW_WITH(entry.wait(), Error, "given up");
      pair.first->close();
      EXPECT_THROW(first.wait(), Error);
    }
    over.arrive_and_wait();
  });
}

// Rank 0: the first communicator's operation after the second's; rank 1 the other way round. No process sees the
// circle.
TEST(comm_after_work, ranks_in_a_circle_end_at_the_deadline_and_name_one_another) {
  run_pairs(2, 0.4, [](Rank& self, Pair& pair) {
    std::vector<std::int64_t> a(100, 1), b(100, 1);
    auto& early = self.rank == 0 ? pair.first : pair.second;
    auto& late = self.rank == 0 ? pair.second : pair.first;
    Work works[3];
    works[0] = sum_over(*early, a);
    works[1] = late->after(works[0]);
    works[2] = sum_over(*late, b);
    int named = 0;
    for (Work& work : works) {
      try {
        work.wait();
        fail(__FILE__, __LINE__, "a work has ended well");
      } catch (const Error& error) {
        named += std::string(error.what()).find("for rank ") != std::string::npos;
      }
    }
    EXPECT_EQ(named, 3);
  });
}

TEST(comm_after_work, a_forked_child_cannot_wait_for_its_parents_operation) {
  run_world(1, small_slots(), [](Rank& self) {
    std::vector<std::int64_t> values(10, 1);
    Work work = sum_over(*self.comm, values);
    work.wait();
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 1;
      try {
        work.follow();
      } catch (const Error& error) {
        code = std::string(error.what()).find("forked") != std::string::npos ? 0 : 2;
      }
      ::_exit(code);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    self.comm->after(work).wait();
  });
}
