// Worlds of ranks for tests of backend nccl: each rank a thread with a device of its own, over FakeNccl.
#pragma once

#include "coll/cuda/nccl_engine.hpp"
#include "coll/support/fake_nccl.hpp"
#include "coll/support/nccl_device.hpp"

namespace zcomm::test {

struct NcclWorldOptions {
  double timeout_s = 30;
  double max_delay_s = 0;  ///< of the streams
  double round_s = 0.02;
  bool messages = false;               ///< with send and recv
  bool connect = true;                 ///< false: the body creates `comm`
  bool has_split = true;               ///< with ncclCommSplit
  std::size_t received_nbytes = 4096;  ///< small, so that modest buffers take many passes
};

struct NcclRank : DeviceRank {
  Communicator* control = nullptr;
  Communicator* guard = nullptr;
  Communicator* messages = nullptr;
  coll::NcclOptions options;
  bool has_split = true;
  void connect() {
    const auto& library = FakeNccl::library(has_split);
    comm = coll::make_nccl_communicator({*control, *guard, messages}, mesh, device, library, options);
  }
};

/// As run_world(); `comm` is over NCCL.
inline void run_nccl_world(int world, const NcclWorldOptions& options, const std::function<void(NcclRank&)>& body) {
  Listeners listeners(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      try {
        const auto mesh = join(listeners, r);
        const auto control = Communicator::create(mesh, small_slots(options.timeout_s, 4096));
        const auto guard = Communicator::create(mesh, small_slots(30, 4096));  // its threads may come late here
        const auto messages =
            options.messages ? Communicator::create(mesh, small_slots(options.timeout_s, 4096)) : nullptr;
        NcclRank self{};
        self.rank = r, self.world = world;
        self.mesh = mesh;
        self.device =
            std::make_shared<NcclDevice>(r, device::make_simulated_device({.seed = static_cast<std::uint64_t>(r) + 1,
                                                                           .max_delay_s = options.max_delay_s,
                                                                           .name = "simulated:" + std::to_string(r)}));
        self.control = control.get();
        self.guard = guard.get();
        self.messages = messages.get();
        self.has_split = options.has_split;
        self.options = {options.timeout_s, options.round_s, options.received_nbytes};
        if (options.connect) self.connect();
        body(self);
        if (self.comm) self.comm->close();
        control->close();
        guard->close();
        if (messages) messages->close();
        mesh->leave();
      } catch (const std::exception& error) {
        fail(__FILE__, __LINE__, "rank " + std::to_string(r) + " of " + std::to_string(world) + ": " + error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

inline Work sum(NcclRank& self, std::vector<float>& values, const Call& call = {}) {
  const Buffer buffer{values.data(), values.size()};
  return self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, call);
}

template <class Call>
void expect_lost(int rank, const char* how, const Call& call) {
  try {
    call();
    fail(__FILE__, __LINE__, "the loss was not noticed");
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.rank, rank);
    const std::string wanted = "rank " + std::to_string(rank) + " " + how;
    if (std::string(error.what()).find(wanted) == std::string::npos) fail(__FILE__, __LINE__, error.what());
  } catch (const Error& error) {
    fail(__FILE__, __LINE__, std::string("no loss: ") + error.what());
  }
}

/// It has been aborted, once; later calls report why, and do not call NCCL.
inline void expect_aborted(FakeNccl& fake, NcclRank& self) {
  std::vector<float> values(4);
  EXPECT_THROW_WITH(sum(self, values).wait(), Error, "unusable since");
  const FakeNccl::CallCounts before = fake.call_counts(self.rank);
  EXPECT_EQ(before.aborted, 1);
  EXPECT_EQ(before.finalized + before.destroyed, 0);
  self.comm->close();
  EXPECT_TRUE(fake.call_counts(self.rank) == before);
}

}  // namespace zcomm::test
