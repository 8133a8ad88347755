// Order, overlap and life: many operations in flight, several communicators, closing, accounting.
#include "coll/support/comm_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

TEST(comm_async, more_in_flight_than_the_queue_holds) {
  run_worlds(1, 4, [](Rank& self) {
    std::vector<std::int64_t> values(64, 1);
    const Buffer buffer{values.data(), values.size()};
    std::vector<Work> works;
    for (int i = 0; i < 600; ++i) {
      works.push_back(self.comm->all_reduce({&buffer, 1}, DType::int64, i % 2 == 0 ? ReduceOp::max : ReduceOp::min));
    }
    for (Work& work : works) work.wait();
    for (Work& work : works) EXPECT_TRUE(work.done());
    EXPECT_TRUE(values == std::vector<std::int64_t>(64, 1));
  });
}

TEST(comm_async, operations_run_in_call_order) {
  run_worlds(1, 4, [](Rank& self) {
    auto symmetric = self.comm->allocate(1000 * 8);
    std::vector<std::int64_t> private_values(1000, 1);
    auto* values = reinterpret_cast<std::int64_t*>(symmetric->data());
    std::fill(values, values + 1000, 1);
    const Buffer buffers[] = {{values, 1000}, {private_values.data(), 1000}};
    std::vector<Work> works;
    std::int64_t wanted = 1;
    for (int i = 0; i < 12; ++i) {
      for (const Buffer& buffer : buffers)
        works.push_back(self.comm->all_reduce({&buffer, 1}, DType::int64, ReduceOp::sum));
      wanted *= self.world;
    }
    works.back().wait();
    for (Work& work : works) EXPECT_TRUE(work.done() || (work.wait(), true));
    EXPECT_EQ(values[999], wanted);
    EXPECT_EQ(private_values[999], wanted);
  });
}

TEST(comm_async, two_communicators_at_once) {
  run_worlds(1, 4, [](Rank& self) {
    auto second = self.comm->duplicate();
    const auto stream = [&](Communicator& comm, int rounds) {
      std::vector<float> values(3001, 1.0f);
      const Buffer buffer{values.data(), values.size()};
      for (int i = 0; i < rounds; ++i) comm.all_reduce({&buffer, 1}, DType::float32, ReduceOp::avg).wait();
      EXPECT_TRUE(values == std::vector<float>(3001, 1.0f));
    };
    std::thread other([&] { stream(*second, 40); });
    stream(*self.comm, 60);
    other.join();
    EXPECT_EQ(second->world_size(), self.world);
  });
}

TEST(comm_async, a_failed_communicator_leaves_its_duplicate_alone) {
  run_world(2, small_slots(), [](Rank& self) {
    auto second = self.comm->duplicate();
    const std::string name = self.rank == 0 ? "a" : "b";
    EXPECT_THROW(self.comm->barrier(name.c_str()).wait(), CollectiveMismatch);
    second->barrier().wait();
  });
}

TEST(comm_async, close_ends_pending_work) {
  std::atomic<bool> is_seen{false};
  run_world(3, small_slots(), [&](Rank& self) {
    self.comm->barrier().wait();
    if (self.rank == 0) {
      std::vector<Work> works;
      for (int i = 0; i < 5; ++i) works.push_back(self.comm->barrier("pending"));
      self.comm->close();
      for (Work& work : works) {
        EXPECT_TRUE(work.done());
        EXPECT_THROW_WITH(work.wait(), Error, "closed");
      }
      EXPECT_THROW_WITH(self.comm->barrier(), Error, "closed");
      EXPECT_THROW_WITH(self.comm->allocate(1), Error, "closed");
      self.comm->close();
    } else if (self.rank == 1) {
      EXPECT_THROW_WITH(self.comm->barrier("pending").wait(), PeerLost, "rank 0 left");
      is_seen = true;
      is_seen.notify_all();
    } else {
      is_seen.wait(false);  // never comes
    }
  });
}

TEST(comm_async, symmetric_memory_outlives_its_communicator) {
  run_worlds(1, 3, [](Rank& self) {
    auto buffer = self.comm->allocate(100);
    buffer->data()[0] = std::byte{7};
    self.comm->barrier().wait();
    self.comm->close();
    self.comm.reset();
    for (int r = 0; r < self.world; ++r) EXPECT_EQ(static_cast<int>(buffer->peer(r)[0]), 7);
  });
}

TEST(comm_async, memory_is_accounted) {
  run_worlds(1, 3, [](Rank& self) {
    const CommMemory before = self.comm->memory();
    EXPECT_GE(before.slot_nbytes, 4u * 4096u);
    EXPECT_EQ(before.symmetric_nbytes, 0u);
    auto a = self.comm->allocate(5000);
    auto b = self.comm->allocate_shared(7000);
    CommMemory now = self.comm->memory();
    EXPECT_EQ(now.symmetric_nbytes, 5000u);
    EXPECT_EQ(now.shared_nbytes, self.rank == 0 ? 7000u : 0u);
    EXPECT_EQ(now.allocation_count, before.allocation_count + 2);
    a.reset();
    b.reset();
    now = self.comm->memory();
    EXPECT_EQ(now.symmetric_nbytes + now.shared_nbytes, 0u);
    EXPECT_EQ(now.allocation_count, before.allocation_count + 2);
    self.comm->close();
    EXPECT_EQ(self.comm->memory().slot_nbytes, 0u);
  });
}

TEST(comm_async, freed_symmetric_memory_is_private_again) {
  run_worlds(2, 3, [](Rank& self) {
    for (int round = 0; round < 4; ++round) {
      auto buffer = self.comm->allocate(4096 * 4);
      auto* values = reinterpret_cast<float*>(buffer->data());
      std::fill(values, values + 4096, 1.0f);
      const Buffer whole{values, 4096}, shifted{values + self.rank, 4000};  // other offsets: not the direct path
      self.comm->all_reduce({&whole, 1}, DType::float32, ReduceOp::sum).wait();
      EXPECT_EQ(values[4095], static_cast<float>(self.world));
      self.comm->all_reduce({&shifted, 1}, DType::float32, ReduceOp::avg).wait();
      EXPECT_EQ(values[4000 - 1], static_cast<float>(self.world));
      buffer.reset();
      std::vector<float> own(4096, 2.0f);
      const Buffer private_buffer{own.data(), own.size()};
      self.comm->all_reduce({&private_buffer, 1}, DType::float32, ReduceOp::avg).wait();
      EXPECT_TRUE(own == std::vector<float>(4096, 2.0f));
    }
  });
}
