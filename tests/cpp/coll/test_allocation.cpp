// The steady state allocates nothing (decision D6): operator new is counted over a thousand mixed collectives.
#include <cstdlib>
#include <new>

#include "coll/support/comm_world.hpp"

namespace {
std::atomic<bool> counting{false};
std::atomic<long> allocations{0};

void* counted(std::size_t nbytes) {
  if (counting.load(std::memory_order_relaxed)) ++allocations;
  if (void* p = std::malloc(nbytes == 0 ? 1 : nbytes)) return p;
  throw std::bad_alloc();
}
}  // namespace

void* operator new(std::size_t nbytes) { return counted(nbytes); }
void* operator new[](std::size_t nbytes) { return counted(nbytes); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }

using namespace zcomm;
using namespace zcomm::test;

/// Two windows of rounds; the first also lets threads settle that the world has just started.
template <class Round>
static void expect_no_allocation(Rank& self, const Round& round) {
  for (int window = 0; window < 2; ++window) {
    self.comm->barrier().wait();
    if (self.rank == 0) {
      allocations = 0;
      counting = true;
    }
    self.comm->barrier().wait();
    for (int i = 0; i < 100; ++i) round();
    self.comm->barrier().wait();
    if (self.rank == 0) {
      counting = false;
      if (window == 1) EXPECT_EQ(allocations.load(), 0);
    }
    self.comm->barrier().wait();
  }
}

TEST(comm_allocation, steady_state_allocates_nothing) {
  for (int world = 1; world <= 3; ++world) {
    run_world(world, small_slots(), [](Rank& self) {
      const auto ranks = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
      auto symmetric = self.comm->allocate(ranks * 1000 * 4);
      std::vector<float> full(ranks * 1000, 1.0f), shard(1000), many(40 * 8);
      std::vector<Buffer> list;
      for (std::size_t i = 0; i < 40; ++i) list.push_back({many.data() + 8 * i, 8});  // longer than inline storage
      const Buffer direct{symmetric->data(), ranks * 1000}, staged{full.data(), full.size()}, part{shard.data(), 1000};
      const ConstBuffer direct_in{direct.data, direct.count}, staged_in{full.data(), full.size()},
          own{full.data() + me * 1000, 1000};
      const std::size_t at_root = me == 0 ? 1 : 0;
      std::vector<ConstBuffer> sent, sent_direct;
      std::vector<Buffer> received;
      std::vector<float> exchanged(ranks * 1000);
      for (std::size_t q = 0; q < ranks; ++q) {
        sent.push_back({full.data() + q * 1000, 1000});
        sent_direct.push_back({symmetric->data() + q * 4000, 1000});
        received.push_back({exchanged.data() + q * 1000, 1000});
      }
      Work previous;
      const auto round = [&] {
        previous = self.comm->all_reduce({&direct, 1}, DType::float32, ReduceOp::avg, "a");
        previous = self.comm->all_reduce({&staged, 1}, DType::float32, ReduceOp::max, "b");
        self.comm->reduce_scatter({&direct_in, 1}, {&part, 1}, DType::float32, ReduceOp::sum, DType::float32, true)
            .wait();
        previous = self.comm->reduce_scatter({&staged_in, 1}, {&part, 1}, DType::float32, ReduceOp::max, DType::float32,
                                             false);
        self.comm->all_gather({&own, 1}, {&staged, 1}, DType::float32, "c").wait();
        self.comm->all_gather({&own, 1}, {&direct, 1}, DType::float32, "d").wait();
        self.comm->broadcast({&staged, 1}, DType::float32, self.world - 1).wait();
        self.comm->all_reduce(list, DType::float32, ReduceOp::min).wait();
        self.comm->barrier().wait();
        self.comm->broadcast({&direct, 1}, DType::float32, 0).wait();
        previous = self.comm->reduce({&direct, 1}, DType::float32, ReduceOp::max, 0);
        previous = self.comm->reduce({&staged, 1}, DType::float32, ReduceOp::max, 0);
        self.comm->gather({&own, 1}, {&direct, at_root}, DType::float32, 0).wait();
        self.comm->gather({&own, 1}, {&staged, at_root}, DType::float32, 0).wait();
        self.comm->scatter({&direct_in, at_root}, {&part, 1}, DType::float32, 0).wait();
        self.comm->scatter({&staged_in, at_root}, {&part, 1}, DType::float32, 0).wait();
        previous = self.comm->all_to_all(sent, received, DType::float32);
        self.comm->all_to_all(sent_direct, received, DType::float32).wait();
      };
      for (int i = 0; i < 3; ++i) round();
      const CommMemory before = self.comm->memory();
      expect_no_allocation(self, round);
      EXPECT_EQ(self.comm->memory().allocation_count, before.allocation_count);
    });
  }
}

TEST(comm_allocation, messages_allocate_nothing_once_warm) {
  run_world(3, small_slots(), [](Rank& self) {
    const int next = (self.rank + 1) % self.world, previous = (self.rank + self.world - 1) % self.world;
    std::vector<float> out(10000, 1.0f), in(10000), small(8);
    const ConstBuffer large_out{out.data(), out.size()}, small_out{small.data(), 8};
    const Buffer halves[] = {{in.data(), 4000}, {in.data() + 4000, 6000}}, small_in{small.data(), 8};
    int source = -1;
    const auto round = [&] {
      Work sent = self.comm->send({&large_out, 1}, DType::float32, next, 1);
      Work early = self.comm->send({&small_out, 1}, DType::float32, next, 2);
      Work received = self.comm->recv(halves, DType::float32, previous, 1);
      self.comm->send({&small_out, 1}, DType::float32, next, 3, kBlocking);
      self.comm->recv({&small_in, 1}, DType::float32, previous, 3,
                      kBlocking);  // finds those with tags 1 and 2 before it
      self.comm->recv({&small_in, 1}, DType::float32, -1, 2, kBlocking, &source);
      sent.wait(), early.wait(), received.wait();
      self.comm->barrier(kBlocking);
    };
    for (int i = 0; i < 20; ++i) round();
    expect_no_allocation(self, round);
  });
}
