// Communicator::after: collectives of host memory that start when a device's copy has landed.
#include "coll/support/comm_world.hpp"
#include "doubles/simulated/device.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

std::shared_ptr<device::Device> slow_device(int rank) {
  return device::make_simulated_device({.seed = static_cast<std::uint64_t>(rank), .max_delay_s = 2e-3});
}

/// An event that is never done, on a working device: it waits for an event of a lost device.
struct Never {
  std::shared_ptr<device::Device> lost = slow_device(0), well = device::make_simulated_device();
  std::unique_ptr<device::Stream> theirs = lost->make_stream(), ours = well->make_stream();
  std::shared_ptr<device::Event> event = well->make_event();
  Never() {
    const auto shared = lost->make_event(true);
    for (int i = 0; i < 20; ++i) theirs->record(*shared);
    lost->lose_after(1);
    ours->wait(*well->open_event(shared->handle()));
    EXPECT_THROW(theirs->record(*shared), CudaError);
    ours->record(*event);
  }
};

}  // namespace

TEST(comm_after, a_collective_starts_when_the_copy_has_landed) {
  run_worlds(1, 4, [](Rank& self) {
    const auto device = slow_device(self.rank);
    const auto stream = device->make_stream();
    const std::shared_ptr<device::Event> landed = device->make_event();
    std::vector<std::int64_t> on_device(600), slot(600), sum(600);
    const Buffer buffer{slot.data(), slot.size()};
    for (int round = 1; round <= 5; ++round) {
      std::fill(on_device.begin(), on_device.end(), round * (self.rank + 1));
      stream->fill(slot.data(), 0xff, 4800);
      stream->copy(slot.data(), on_device.data(), 4800);
      stream->record(*landed);
      Work waited = self.comm->after(landed);
      Work work = self.comm->all_reduce({&buffer, 1}, DType::int64, ReduceOp::sum);
      work.wait();
      EXPECT_TRUE(waited.done());
      EXPECT_TRUE(slot == std::vector<std::int64_t>(600, round * self.world * (self.world + 1) / 2));
    }
  });
}

TEST(comm_after, it_is_local) {
  run_worlds(1, 4, [](Rank& self) {
    const auto device = slow_device(1);
    const auto stream = device->make_stream();
    const std::shared_ptr<device::Event> event = device->make_event();
    for (int i = 0; i < 6; ++i) {
      stream->record(*event);
      if (i % self.world == self.rank) self.comm->after(event, kBlocking);
      if (i % self.world == self.rank) EXPECT_TRUE(event->done());
      if (self.rank == 0) self.comm->after(event);  // dropping the Work waits
      self.comm->barrier(kBlocking);
    }
    self.comm->after(device->make_event()).wait();  // never recorded: done
  });
}

TEST(comm_after, the_event_may_be_dropped) {
  run_world(2, small_slots(), [](Rank& self) {
    const auto device = slow_device(self.rank);
    const auto stream = device->make_stream();
    std::vector<Work> works;
    for (int i = 0; i < 30; ++i) {
      std::shared_ptr<device::Event> event = device->make_event();
      stream->record(*event);
      works.push_back(self.comm->after(std::move(event)));
    }
    for (Work& work : works) work.wait();
  });
}

TEST(comm_after, closing_ends_it) {
  run_world(1, small_slots(600), [](Rank& self) {
    Never never;
    Work work = self.comm->after(never.event);
    Work behind = self.comm->barrier();
    EXPECT_FALSE(work.wait_for(0.05));
    self.comm->close();
    EXPECT_THROW_WITH(work.wait(), Error, "closed before the event");
    EXPECT_THROW(behind.wait(), Error);
  });
}

TEST(comm_after, it_has_a_deadline_and_the_other_ranks_are_told) {
  Listeners listeners(2);
  std::thread other([&] {
    const auto mesh = join(listeners, 1);
    const auto comm = Communicator::create(mesh, small_slots(0.3));
    comm->suspend_deadline();  // only for the other rank, so that this rank cannot be the late one
    EXPECT_THROW_WITH(comm->barrier(kBlocking), PeerLost, "rank 0 left");
  });
  const auto mesh = join(listeners, 0);
  const auto comm = Communicator::create(mesh, small_slots(0.3));
  Never never;
  EXPECT_THROW_WITH(comm->after(never.event, kBlocking), Timeout, "an event of its device");
  EXPECT_THROW_WITH(comm->barrier(kBlocking), Timeout, "unusable since");
  other.join();
}

TEST(comm_after, a_lost_device_poisons_and_the_other_ranks_are_told) {
  run_world(3, small_slots(600), [](Rank& self) {
    if (self.rank != 1) {
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), PeerLost, "rank 1 left");
      return;
    }
    const auto device = slow_device(self.rank);
    const auto stream = device->make_stream();
    const std::shared_ptr<device::Event> event = device->make_event();
    device->lose_after(2);
    stream->record(*event);
    EXPECT_THROW(stream->record(*event), CudaError);
    EXPECT_THROW_WITH(self.comm->after(event).wait(), CudaError, "the GPU is lost");
    // Poisoned by then: the call itself raises.
    EXPECT_THROW_WITH(self.comm->barrier(), CudaError, "unusable since");
    EXPECT_THROW_WITH(self.comm->after(event), CudaError, "unusable since");
  });
}

TEST(comm_after, what_was_queued_before_the_device_was_lost_raises_when_it_is_waited_for) {
  run_world(3, small_slots(600), [](Rank& self) {
    if (self.rank != 1) {
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), PeerLost, "rank 1 left");
      return;
    }
    Never never;
    Work work = self.comm->after(never.event);
    Work behind = self.comm->barrier();
    EXPECT_FALSE(work.wait_for(0.02));
    never.well->lose_after(1);
    EXPECT_THROW(never.ours->record(*never.well->make_event()), CudaError);
    EXPECT_THROW_WITH(work.wait(), CudaError, "the GPU is lost");
    EXPECT_THROW_WITH(behind.wait(), CudaError, "unusable since");
    EXPECT_THROW_WITH(self.comm->barrier(), CudaError, "unusable since");
  });
}

TEST(comm_after, no_event) {
  run_world(1, small_slots(), [](Rank& self) { EXPECT_THROW(self.comm->after(nullptr), InvalidArgument); });
}
