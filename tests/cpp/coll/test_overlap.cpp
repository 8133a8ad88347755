// Buffers of one call that share memory: right in place, refused elsewhere, on every engine.
#include <array>
#include <numeric>

#include "coll/overlap.hpp"
#include "coll/support/error_checks.hpp"
#include "coll/support/hierarchical_world.hpp"

namespace overlap_test {

using namespace zcomm;
using namespace zcomm::coll;
using namespace zcomm::test;

namespace {

using Body = std::function<void(Rank&)>;

/// Shared memory, only sockets, and two hosts of two ranks.
void on_every_engine(const Body& body) {
  for (const std::size_t one_shot_nbytes : {0, 4096}) run_world(3, small_slots(30, one_shot_nbytes), body);
  run_world(1, small_slots(), body);
  run_link_world(3, {}, body);
  run_hosts({0, 0, 1, 1}, 30, [&](HierarchicalRank& self) { body(self); });
}

constexpr std::array<std::size_t, 3> kCounts{1, 300, 100'000};

float* floats(Memory& memory) { return reinterpret_cast<float*>(memory.data()); }

float value(int rank, std::size_t part, std::size_t i) {
  return static_cast<float>(1000 * rank) + static_cast<float>(10 * part) + static_cast<float>(i % 7);
}

void fill(float* to, int rank, std::size_t part, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = value(rank, part, i);
}

std::size_t wrong(const float* got, std::size_t count, const std::function<float(std::size_t)>& wanted) {
  std::size_t bad = 0;
  for (std::size_t i = 0; i < count; ++i) bad += got[i] != wanted(i);
  return bad;
}

/// `body(memory of world_size * n floats, n)` in private and in symmetric memory.
void with_memory(Rank& self, const std::function<void(float*, std::size_t)>& body) {
  for (const std::size_t n : kCounts) {
    for (const bool symmetric : {false, true}) {
      Memory memory = Memory::make(*self.comm, static_cast<std::size_t>(self.world) * n * sizeof(float), symmetric);
      body(floats(memory), n);
      self.comm->barrier().wait();
    }
  }
}

}  // namespace

TEST(overlap, in_place_is_right) {
  on_every_engine([](Rank& self) {
    Communicator& comm = *self.comm;
    const auto world = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
    with_memory(self, [&](float* whole, std::size_t n) {
      float* const own = whole + me * n;
      const ConstBuffer in_part{own, n}, in_whole{whole, world * n};
      const Buffer out_part{own, n}, out_whole{whole, world * n};

      fill(own, self.rank, 0, n);
      comm.all_gather({&in_part, 1}, {&out_whole, 1}, DType::float32).wait();
      for (std::size_t q = 0; q < world; ++q)
        EXPECT_EQ(wrong(whole + q * n, n, [&](std::size_t i) { return value(static_cast<int>(q), 0, i); }), 0u);

      for (std::size_t q = 0; q < world; ++q) fill(whole + q * n, self.rank, q, n);
      comm.reduce_scatter({&in_whole, 1}, {&out_part, 1}, DType::float32, ReduceOp::sum, DType::float32, false).wait();
      EXPECT_EQ(wrong(own, n,
                      [&](std::size_t i) {
                        float sum = 0;
                        for (int r = 0; r < self.world; ++r) sum += value(r, me, i);
                        return sum;
                      }),
                0u);

      const int root = self.world - 1;
      const bool is_root = self.rank == root;
      fill(own, self.rank, 3, n);
      comm.gather({&in_part, 1}, {&out_whole, is_root ? 1u : 0u}, DType::float32, root).wait();
      for (std::size_t q = 0; is_root && q < world; ++q)
        EXPECT_EQ(wrong(whole + q * n, n, [&](std::size_t i) { return value(static_cast<int>(q), 3, i); }), 0u);

      for (std::size_t q = 0; q < world; ++q) fill(whole + q * n, root, q, n);
      comm.scatter({&in_whole, is_root ? 1u : 0u}, {&out_part, 1}, DType::float32, root).wait();
      EXPECT_EQ(wrong(own, n, [&](std::size_t i) { return value(root, me, i); }), 0u);
    });
  });
}

TEST(overlap, all_to_all_may_leave_the_own_part_where_it_is) {
  on_every_engine([](Rank& self) {
    const auto world = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
    with_memory(self, [&](float* whole, std::size_t n) {
      fill(whole + me * n, self.rank, 0, n);
      std::vector<ConstBuffer> in(world, {whole + me * n, n});  // an all_gather in place
      std::vector<Buffer> out;
      for (std::size_t q = 0; q < world; ++q) out.push_back({whole + q * n, n});
      self.comm->all_to_all(in, out, DType::float32).wait();
      for (std::size_t q = 0; q < world; ++q)
        EXPECT_EQ(wrong(whole + q * n, n, [&](std::size_t i) { return value(static_cast<int>(q), 0, i); }), 0u);
    });
  });
}

TEST(overlap, anything_else_is_refused_and_leaves_the_communicator_usable) {
  on_every_engine([](Rank& self) {
    Communicator& comm = *self.comm;
    const auto world = static_cast<std::size_t>(self.world);
    if (world == 1) return;
    const int root = 0;
    for (const std::size_t n : kCounts) {
      for (const bool symmetric : {false, true}) {
        Memory memory = Memory::make(comm, 3 * world * (n + 2) * sizeof(float), symmetric);
        float* const whole = floats(memory);
        const auto refused = [&](const auto& call) {
          const std::string message = message_of<InvalidArgument>(call, "overlap");
          expect_contains(message, {" at [0x", "and output", "overlap; "});
        };
        // One element off its own part, or another rank's part.
        const std::size_t elsewhere = static_cast<std::size_t>((self.rank + 1) % self.world) * n;
        for (const std::size_t at : {elsewhere, static_cast<std::size_t>(self.rank) * n + 1}) {
          const ConstBuffer in{whole + at, n}, big_in{whole, world * n};
          const Buffer out{whole, world * n}, small_out{whole + at, n};
          if (n == 1 && at == world) continue;  // after the end of it
          refused([&] { comm.all_gather({&in, 1}, {&out, 1}, DType::float32); });
          refused([&] {
            comm.reduce_scatter({&big_in, 1}, {&small_out, 1}, DType::float32, ReduceOp::sum, DType::float32, false);
          });
          if (self.rank != root) continue;
          refused([&] { comm.gather({&in, 1}, {&out, 1}, DType::float32, root); });
          refused([&] { comm.scatter({&big_in, 1}, {&small_out, 1}, DType::float32, root); });
        }
        const ConstBuffer big_in{whole, world * n};
        const Buffer own{whole + static_cast<std::size_t>(self.rank) * n, n};
        refused(
            [&] { comm.reduce_scatter({&big_in, 1}, {&own, 1}, DType::float32, ReduceOp::sum, DType::float32, true); });
        if (self.rank == 0)  // as float32, the shard of 16-bit elements is twice as large as its place
          refused([&] {
            comm.reduce_scatter({&big_in, 1}, {&own, 1}, DType::bfloat16, ReduceOp::sum, DType::float32, false);
          });

        std::vector<ConstBuffer> parts;
        std::vector<Buffer> outs;
        for (std::size_t q = 0; q < world; ++q) parts.push_back({whole + q * n, n}), outs.push_back({whole + q * n, n});
        refused([&] { comm.all_to_all(parts, outs, DType::float32); });
        std::vector<Buffer> twice(world, {whole + world * n, n});
        refused([&] { comm.all_to_all(parts, twice, DType::float32); });

        // Lists: two outputs at one place, an input in another's output.
        const std::array<Buffer, 2> same{Buffer{whole + 1, n}, Buffer{whole, n + 1}};
        refused([&] { comm.all_reduce(same, DType::float32, ReduceOp::sum); });
        refused([&] { comm.reduce(same, DType::float32, ReduceOp::sum, root); });
        refused([&] { comm.broadcast(same, DType::float32, root); });
        const std::array<ConstBuffer, 2> ins{ConstBuffer{whole + world * n, n}, ConstBuffer{whole, n}};
        const std::array<Buffer, 2> wholes{Buffer{whole + world * n + n, world * n}, Buffer{whole + n, world * n}};
        refused([&] { comm.all_gather(ins, wholes, DType::float32); });
      }
    }
    const std::array<float, 3> apart{};
    const std::array<Buffer, 2> into{Buffer{const_cast<float*>(apart.data()), 2},
                                     Buffer{const_cast<float*>(&apart[1]), 2}};
    EXPECT_THROW_WITH(comm.recv(into, DType::float32, (self.rank + 1) % self.world, 0), InvalidArgument,
                      "each must have memory of its own");
    float one = 1;
    const Buffer buffer{&one, 1};
    comm.all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum).wait();
    EXPECT_EQ(one, static_cast<float>(self.world));
  });
}

TEST(overlap, lists_in_any_order_that_lie_apart) {
  constexpr std::size_t kBuffers = 200, kCount = 8;
  std::vector<float> memory(kBuffers * kCount * 2);
  std::vector<std::size_t> order(kBuffers);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 engine(7);
  for (int round = 0; round < 20; ++round) {
    std::shuffle(order.begin(), order.end(), engine);
    std::vector<Buffer> out;
    std::vector<ConstBuffer> in;
    for (const std::size_t i : order) {
      out.push_back({memory.data() + 2 * i * kCount, kCount});
      in.push_back({memory.data() + (2 * i + 1) * kCount, kCount});
    }
    out.push_back({memory.data() + 1, 0});  // empty: any address
    in.push_back({memory.data() + 1, 0});
    OverlapCheck call{"all_gather", OpKind::all_gather, in, out, sizeof(float), sizeof(float), 0};
    check_overlap(call);
    in[17] = {out[150].data, 1};
    call.in = in;
    EXPECT_THROW_WITH(check_overlap(call), InvalidArgument, "input 17 at [0x");
    in[17] = {nullptr, 0};
    out[3].data = static_cast<float*>(out[90].data) + kCount - 1;
    call.in = in, call.out = out;
    EXPECT_THROW_WITH(check_overlap(call), InvalidArgument, "overlap");
  }
}

}  // namespace overlap_test
