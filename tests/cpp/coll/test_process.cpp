// Ranks as processes: the same code as with threads, and death by SIGKILL.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <new>

#include "coll/support/process_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

bool collectives_are_right(Rank& self) {
  const auto ranks = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
  const std::size_t part = 5003, whole = part * ranks;
  bool good = true;
  for (const bool symmetric : {true, false}) {
    Memory memory = Memory::make(*self.comm, whole * 4, symmetric);
    auto* values = reinterpret_cast<float*>(memory.data());
    const auto set = [&] {
      for (std::size_t i = 0; i < whole; ++i) values[i] = static_cast<float>((i % 11) * (me + 1));
    };
    const auto sum_at = [&](std::size_t i) { return static_cast<float>((i % 11) * (ranks * (ranks + 1) / 2)); };
    const Buffer all{values, whole};
    const ConstBuffer in{values, whole};
    std::vector<float> shard(part);
    const Buffer out{shard.data(), part};
    const ConstBuffer own{shard.data(), part};
    set();
    self.comm->reduce_scatter({&in, 1}, {&out, 1}, DType::float32, ReduceOp::sum, DType::float32, false).wait();
    for (std::size_t i = 0; i < part; ++i) good &= shard[i] == sum_at(me * part + i);
    self.comm->all_reduce({&all, 1}, DType::float32, ReduceOp::sum).wait();
    for (std::size_t i = 0; i < whole; ++i) good &= values[i] == sum_at(i);
    std::memset(values, 0, whole * 4);
    self.comm->all_gather({&own, 1}, {&all, 1}, DType::float32).wait();
    for (std::size_t i = 0; i < whole; ++i) good &= values[i] == sum_at(i);
    set();
    self.comm->broadcast({&all, 1}, DType::float32, self.world - 1).wait();
    for (std::size_t i = 0; i < whole; ++i) good &= values[i] == static_cast<float>((i % 11) * ranks);
  }
  return good;
}

bool all_reduce_until_lost(Rank& self, int expected) {
  std::vector<float> values(50000);
  const Buffer buffer{values.data(), values.size()};
  for (int call = 0; call < 2; ++call) {  // the second finds the communicator poisoned
    try {
      for (;;) self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum).wait();
    } catch (const PeerLost& lost) {
      if (lost.rank != expected) std::cerr << "rank " << self.rank << ": " << lost.what() << std::endl;
      if (lost.rank != expected) return false;
    }
  }
  return true;
}

/// Counts processes that have finished their work, in memory that they share.
class Ended {
 public:
  Ended()
      : count_(new(::mmap(nullptr, sizeof(Count), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
                   Count(0)) {}
  ~Ended() { ::munmap(count_, sizeof(Count)); }
  Ended(const Ended&) = delete;

  /// Counts this one, and waits for `all`, 30 s at most.
  void wait_for(int all) const {
    ++*count_;
    for (int i = 0; i < 30'000 && *count_ < all; ++i) ::usleep(1000);
  }

 private:
  using Count = std::atomic<int>;
  Count* count_;
};

}  // namespace

TEST(comm_process, collectives) {
  for (const int world : {1, 2, 4})
    EXPECT_TRUE(run_processes(world, 30, collectives_are_right) ==
                std::vector<int>(static_cast<std::size_t>(world), 0));
}

TEST(comm_process, shared_memory) {
  const auto codes = run_processes(3, 30, [](Rank& self) {
    auto shared = self.comm->allocate_shared(3 * 8);
    auto* values = reinterpret_cast<std::int64_t*>(shared->data());
    values[self.rank] = self.rank + 1;
    self.comm->barrier().wait();
    return values[0] == 1 && values[1] == 2 && values[2] == 3;
  });
  EXPECT_TRUE(codes == std::vector<int>(3, 0));
}

TEST(comm_process, killed_rank_is_named_by_all) {
  for (int victim = 0; victim < 3; ++victim) {
    const auto codes = run_processes(3, 30, [&](Rank& self) {
      self.comm->barrier().wait();
      if (self.rank == victim) {
        std::vector<float> values(50000);
        const Buffer buffer{values.data(), values.size()};
        for (int i = 0; i < 5; ++i) self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum).wait();
        Work pending = self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum);
        ::kill(::getpid(), SIGKILL);
      }
      return all_reduce_until_lost(self, victim);
    });
    for (int r = 0; r < 3; ++r) EXPECT_EQ(codes[static_cast<std::size_t>(r)], r == victim ? -SIGKILL : 0);
  }
}

TEST(comm_process, mismatch_and_late_rank) {
  const Ended told;
  const auto mismatch = run_processes(3, 30, [&](Rank& self) {
    bool good = false;
    try {
      self.comm->barrier(self.rank == 1 ? "x" : "y").wait();
    } catch (const CollectiveMismatch& error) {
      good = std::string(error.what()).find("rank 0, 2: barrier 'y'; rank 1: barrier 'x'") != std::string::npos;
    }
    told.wait_for(3);  // no rank is lost to one that looks later
    return good;
  });
  EXPECT_TRUE(mismatch == std::vector<int>(3, 0));
  const Ended over;
  const auto late = run_processes(2, 1.0, [&](Rank& self) {
    bool good = self.rank == 1;
    if (self.rank == 0) {
      try {
        self.comm->barrier("z").wait();
      } catch (const Timeout& error) {
        good = std::string(error.what()).find("rank 1 to enter it") != std::string::npos;
      }
    }
    over.wait_for(2);
    return good;
  });
  EXPECT_TRUE(late == std::vector<int>(2, 0));
}
