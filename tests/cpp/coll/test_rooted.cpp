// reduce, gather, scatter (and the code that all_to_all shares with them): values, buffers that are only read, in-place
// parts, lists, memory that a rank has dropped.
#include <atomic>
#include <chrono>

#include "coll/support/comm_values.hpp"

namespace rooted_test {

using namespace zcomm;
using namespace zcomm::test;

namespace {

std::vector<int> roots_of(const Rank& self) {
  return self.world == 1 ? std::vector<int>{0} : std::vector<int>{0, self.world - 1};
}

void check_reduce(Rank& self, DType dtype, std::size_t count, Place place) {
  const std::size_t nbytes = count * size_of(dtype);
  Memory memory = Memory::make(*self.comm, nbytes, symmetric_on(place, self.rank));
  const auto bytes = encode(dtype, values_of(self.rank, count));
  for (const int root : roots_of(self))
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod}) {
      if (op == ReduceOp::avg && (!is_floating(dtype) || dtype == DType::float64)) continue;
      if (op != ReduceOp::sum && count > 1000) continue;
      std::memcpy(memory.data(), bytes.data(), nbytes);
      const Buffer buffer{memory.data(), count};
      self.comm->reduce({&buffer, 1}, dtype, op, root).wait();
      if (self.rank == root)
        CHECK_EQUAL(dtype, memory.data(), reduced(self.world, count, op), "reduce");
      else if (std::memcmp(memory.data(), bytes.data(), nbytes) != 0)
        fail(__FILE__, __LINE__, label("reduce changed a buffer that it only reads:", self, dtype, count, place));
    }
}

void check_gather(Rank& self, DType dtype, std::size_t count, Place place) {
  const auto ranks = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
  const std::size_t nbytes = count * size_of(dtype);
  Memory in = Memory::make(*self.comm, nbytes, symmetric_on(place, self.rank));
  Memory out = Memory::make(*self.comm, ranks * nbytes, symmetric_on(place, self.rank));
  const auto bytes = encode(dtype, values_of(self.rank, count));
  std::vector<double> wanted;
  for (int r = 0; r < self.world; ++r) {
    const auto part = values_of(r, count);
    wanted.insert(wanted.end(), part.begin(), part.end());
  }
  for (const int root : roots_of(self)) {
    const bool at_root = self.rank == root;
    const ConstBuffer variants[] = {{in.data(), count}, {bytes.data(), count}, {out.data() + me * nbytes, count}};
    for (const ConstBuffer& from : variants) {
      std::memcpy(in.data(), bytes.data(), nbytes);
      std::memset(out.data(), 0x55, ranks * nbytes);
      std::memcpy(out.data() + me * nbytes, bytes.data(), nbytes);
      const Buffer to{out.data(), ranks * count};
      self.comm->gather({&from, 1}, {&to, at_root ? 1u : 0u}, dtype, root).wait();
      if (at_root) CHECK_EQUAL(dtype, out.data(), wanted, "gather");
      EXPECT_TRUE(std::memcmp(from.data, bytes.data(), nbytes) == 0);
    }
  }
}

void check_scatter(Rank& self, DType dtype, std::size_t count, Place place) {
  const auto ranks = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
  const std::size_t nbytes = count * size_of(dtype);
  Memory in = Memory::make(*self.comm, ranks * nbytes, symmetric_on(place, self.rank));
  Memory out = Memory::make(*self.comm, nbytes, symmetric_on(place, self.rank));
  const auto bytes = encode(dtype, values_of(self.rank, ranks * count));
  for (const int root : roots_of(self))
    for (const bool in_place : {false, true}) {
      const bool at_root = self.rank == root;
      std::memcpy(in.data(), bytes.data(), ranks * nbytes);
      std::memset(out.data(), 0x55, nbytes);
      const ConstBuffer from{in.data(), ranks * count};
      const Buffer to{at_root && in_place ? in.data() + me * nbytes : out.data(), count};
      self.comm->scatter({&from, at_root ? 1u : 0u}, {&to, 1}, dtype, root).wait();
      const auto whole = values_of(root, ranks * count);
      const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(me * count);
      const std::vector<double> wanted(begin, begin + static_cast<std::ptrdiff_t>(count));
      CHECK_EQUAL(dtype, static_cast<std::byte*>(to.data), wanted, "scatter");
      EXPECT_TRUE(std::memcmp(in.data(), bytes.data(), ranks * nbytes) == 0);
    }
}

}  // namespace

TEST(comm_rooted, reduce_values) {
  run_worlds(1, 5, [](Rank& self) { for_each_case(self, check_reduce); });
}
TEST(comm_rooted, gather_values) {
  run_worlds(1, 5, [](Rank& self) { for_each_case(self, check_gather); });
}
TEST(comm_rooted, scatter_values) {
  run_worlds(1, 5, [](Rank& self) { for_each_case(self, check_scatter); });
}

TEST(comm_rooted, six_to_nine_ranks) {
  run_worlds(6, 9, [](Rank& self) {
    for (const Place place : kPlaces) {
      check_reduce(self, DType::float32, 1000, place);
      check_reduce(self, DType::bfloat16, 77, place);
      check_gather(self, DType::float32, 1000, place);
      check_scatter(self, DType::int64, 1000, place);
    }
  });
}

TEST(comm_rooted, bytes_travel_unchanged) {
  run_worlds(1, 3, [](Rank& self) {
    for (const DType dtype : {DType::int8, DType::uint8, DType::boolean})
      for (const Place place : kPlaces) {
        check_gather(self, dtype, 5003, place);
        check_scatter(self, dtype, 5003, place);
      }
  });
}

TEST(comm_rooted, reduce_has_the_bits_of_all_reduce) {
  run_worlds(1, 5, [](Rank& self) {
    for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16})
      for (const std::size_t count : {1u, 63u, 5003u})
        for (const Place place : kPlaces) {
          const auto floats = random_floats(count, 100u + static_cast<unsigned>(self.rank));
          const auto bytes = encode(dtype, {floats.begin(), floats.end()});
          auto all = bytes;
          const Buffer whole{all.data(), count};
          self.comm->all_reduce({&whole, 1}, dtype, ReduceOp::avg).wait();
          Memory memory = Memory::make(*self.comm, count * size_of(dtype), symmetric_on(place, self.rank));
          std::memcpy(memory.data(), bytes.data(), count * size_of(dtype));
          const int root = self.world / 2;
          const Buffer buffer{memory.data(), count};
          self.comm->reduce({&buffer, 1}, dtype, ReduceOp::avg, root).wait();
          const auto& wanted = self.rank == root ? all : bytes;
          EXPECT_TRUE(std::memcmp(memory.data(), wanted.data(), count * size_of(dtype)) == 0);
        }
  });
}

TEST(comm_rooted, lists_are_one_operation) {
  run_worlds(1, 4, [](Rank& self) {
    const auto ranks = static_cast<std::size_t>(self.world);
    const int root = self.world - 1;
    const bool at_root = self.rank == root;
    for (const bool symmetric : {false, true}) {
      std::vector<Memory> shards, fulls, backs;
      std::vector<ConstBuffer> in, full_in;
      std::vector<Buffer> out, back, sums;
      for (std::size_t i = 0; i < 40; ++i) {  // longer than the inline storage, with empty and large members
        const std::size_t count = i == 7 ? 20011 : i % 5 == 0 ? 0 : i * 3;
        shards.push_back(Memory::make(*self.comm, count * 4, symmetric));
        fulls.push_back(Memory::make(*self.comm, ranks * count * 4, symmetric));
        backs.push_back(Memory::make(*self.comm, count * 4, symmetric));
        std::memcpy(shards[i].data(), encode(DType::float32, values_of(self.rank, count, i)).data(), count * 4);
        in.push_back({shards[i].data(), count});
        sums.push_back({shards[i].data(), count});
        out.push_back({fulls[i].data(), ranks * count});
        full_in.push_back({fulls[i].data(), ranks * count});
        back.push_back({backs[i].data(), count});
      }
      if (!at_root) out.clear(), full_in.clear();
      self.comm->gather(in, out, DType::float32, root).wait();
      self.comm->scatter(full_in, back, DType::float32, root).wait();
      for (std::size_t i = 0; i < 40; ++i) EXPECT_TRUE(std::memcmp(back[i].data, in[i].data, in[i].count * 4) == 0);
      self.comm->reduce(sums, DType::float32, ReduceOp::sum, root).wait();
      for (std::size_t i = 0; i < 40 && at_root; ++i)
        EXPECT_TRUE(equal(DType::float32, shards[i].data(), reduced(self.world, sums[i].count, ReduceOp::sum, i)));
    }
    self.comm->gather({}, {}, DType::float32, 0).wait();
    self.comm->scatter({}, {}, DType::float32, 0).wait();
    self.comm->reduce({}, DType::float32, ReduceOp::sum, 0).wait();
  });
}

TEST(comm_rooted, a_list_too_long_for_its_places) {  // more buffers than a slot of 4096 bytes has offsets for
  run_worlds(2, 3, [](Rank& self) {
    const auto ranks = static_cast<std::size_t>(self.world);
    auto full = self.comm->allocate(300 * 16 * ranks);
    std::vector<float> shard(300 * 4, static_cast<float>(self.rank + 1));
    std::vector<ConstBuffer> in;
    std::vector<Buffer> out;
    for (std::size_t i = 0; i < 300; ++i) {
      in.push_back({shard.data() + 4 * i, 4});
      if (self.rank == 0) out.push_back({full->data() + i * 16 * ranks, 4 * ranks});
    }
    self.comm->gather(in, out, DType::float32, 0).wait();
    const auto* values = reinterpret_cast<const float*>(full->data());
    for (std::size_t i = 0; i < 300 * 4 * ranks && self.rank == 0; ++i)
      EXPECT_EQ(values[i], static_cast<float>(i / 4 % ranks + 1));
  });
}

TEST(comm_rooted, any_number_of_slots) {
  for (int slots = 1; slots <= 5; ++slots) {
    run_world(3, {30, 4096, slots}, [](Rank& self) {
      for (int i = 0; i < 2; ++i)
        for (const Place place : kPlaces) {
          check_reduce(self, DType::float32, 10007, place);
          check_gather(self, DType::float32, 10007, place);
          check_scatter(self, DType::float32, 10007, place);
        }
    });
  }
}

TEST(comm_rooted, the_others_may_have_dropped_the_memory) {
  run_worlds(2, 4, [](Rank& self) {
    const auto ranks = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
    const std::size_t count = 5000;
    for (int round = 0; round < 6; ++round) {
      const int root = round % self.world;
      auto buffer = self.comm->allocate(ranks * count * 4);
      auto* whole = reinterpret_cast<float*>(buffer->data());
      // round 0, 1: every rank has it; later one, then all other ranks have dropped it
      if (self.rank != root && (round >= 4 || (round >= 2 && self.rank == (root + 1) % self.world))) buffer.reset();
      std::vector<float> part(count, static_cast<float>(self.rank + round));
      const ConstBuffer in{part.data(), count}, full_in{whole, ranks * count};
      const Buffer out{part.data(), count}, full{whole, ranks * count};
      const std::size_t sides = self.rank == root ? 1 : 0;
      self.comm->gather({&in, 1}, {&full, sides}, DType::float32, root).wait();
      if (sides == 1)
        for (std::size_t i = 0; i < ranks * count; ++i) whole[i] += 0.5f;
      self.comm->scatter({&full_in, sides}, {&out, 1}, DType::float32, root).wait();
      EXPECT_TRUE(part == std::vector<float>(count, static_cast<float>(me) + static_cast<float>(round) + 0.5f));
    }
  });
}

TEST(comm_rooted, memory_may_be_dropped_while_others_copy) {
  run_world(3, small_slots(), [](Rank& self) {
    const std::size_t count = 60000;
    for (int round = 0; round < 20; ++round) {
      auto buffer = self.comm->allocate(3 * count * 4);
      auto* whole = reinterpret_cast<float*>(buffer->data());
      if (self.rank == 0) std::fill(whole, whole + 3 * count, static_cast<float>(round));
      std::vector<float> part(count);
      const ConstBuffer in{whole, 3 * count};
      const Buffer out{part.data(), count};
      Work work = self.comm->scatter({&in, self.rank == 0 ? 1u : 0u}, {&out, 1}, DType::float32, 0);
      if (self.rank != 0) buffer.reset();  // not a buffer of this call on this rank
      work.wait();
      EXPECT_TRUE(part == std::vector<float>(count, static_cast<float>(round)));
    }
  });
}

TEST(comm_rooted, a_rank_that_dies_is_named_in_each_operation) {
  for (int kind = 0; kind < 4; ++kind)
    for (const bool symmetric : {false, true}) {
      std::atomic<int> survivors{2};
      run_world(3, small_slots(), [&](Rank& self) {
        const std::size_t count = 20000;
        Memory whole = Memory::make(*self.comm, 3 * count * 4, symmetric);
        std::vector<float> other(3 * count);
        const bool at_root = self.rank == 0;
        const Buffer out{whole.data(), 3 * count}, part{other.data(), count};
        const ConstBuffer in{other.data(), count}, whole_in{whole.data(), 3 * count};
        std::vector<ConstBuffer> parts(3, {whole.data(), count});
        std::vector<Buffer> parts_out;
        for (std::size_t q = 0; q < 3; ++q) parts_out.push_back({other.data() + q * count, count});
        const auto call = [&] {
          if (kind == 0) self.comm->reduce({&out, 1}, DType::float32, ReduceOp::max, 0).wait();
          if (kind == 1) self.comm->gather({&in, 1}, {&out, at_root ? 1u : 0u}, DType::float32, 0).wait();
          if (kind == 2) self.comm->scatter({&whole_in, at_root ? 1u : 0u}, {&part, 1}, DType::float32, 0).wait();
          if (kind == 3) self.comm->all_to_all(parts, parts_out, DType::float32).wait();
        };
        if (self.rank == 2) {
          call();
          self.mesh->drop_dead();
          while (survivors > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          return;
        }
        struct Leaving {
          std::atomic<int>& count;
          ~Leaving() { --count; }
        } const leaving{survivors};
        try {
          for (;;) call();
        } catch (const PeerLost& lost) {
          EXPECT_EQ(lost.rank, 2);
        }
      });
    }
}

TEST(comm_rooted, arguments) {
  run_worlds(1, 3, [](Rank& self) {
    Communicator& comm = *self.comm;
    std::vector<float> values(64);
    const auto ranks = static_cast<std::size_t>(self.world);
    const bool at_root = self.rank == 0;
    const ConstBuffer in{values.data(), 4}, whole_in{values.data(), 4 * ranks}, odd_in{values.data(), 4 * ranks + 1};
    const Buffer out{values.data() + 32, 4}, whole{values.data() + 32, 4 * ranks},
        odd{values.data() + 32, 4 * ranks + 1};
    EXPECT_THROW_WITH(comm.reduce({&out, 1}, DType::float32, ReduceOp::sum, self.world), InvalidArgument, "root=");
    EXPECT_THROW_WITH(comm.gather({&in, 1}, {&whole, 1}, DType::float32, -1), InvalidArgument, "root=-1");
    EXPECT_THROW_WITH(comm.scatter({&whole_in, 1}, {&out, 1}, DType::float32, 99), InvalidArgument, "root=99");
    if (at_root) {
      EXPECT_THROW_WITH(comm.gather({&in, 1}, {&odd, 1}, DType::float32, 0), InvalidArgument, "world_size");
      EXPECT_THROW_WITH(comm.gather({&in, 1}, {}, DType::float32, 0), InvalidArgument, "1 inputs and 0 outputs");
      EXPECT_THROW_WITH(comm.scatter({&odd_in, 1}, {&out, 1}, DType::float32, 0), InvalidArgument, "world_size");
    } else {
      EXPECT_THROW_WITH(comm.gather({&in, 1}, {&whole, 1}, DType::float32, 0), InvalidArgument, "root=0");
      EXPECT_THROW_WITH(comm.scatter({&whole_in, 1}, {&out, 1}, DType::float32, 0), InvalidArgument, "root=0");
    }
    comm.barrier().wait();  // nothing was poisoned
  });
}

}  // namespace rooted_test
