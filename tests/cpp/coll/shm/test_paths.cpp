// Paths agree to the bit; lists, accumulation, slots, shared memory.
#include "coll/support/comm_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

std::vector<std::byte> random_elements(DType dtype, std::size_t count, int rank) {
  const auto floats = random_floats(count, 100u + static_cast<unsigned>(rank));
  return encode(dtype, std::vector<double>(floats.begin(), floats.end()));
}

std::vector<std::byte> all_reduced(Rank& self, DType dtype, std::size_t count, bool symmetric) {
  Memory memory = Memory::make(*self.comm, count * size_of(dtype), symmetric);
  const auto bytes = random_elements(dtype, count, self.rank);
  std::memcpy(memory.data(), bytes.data(), count * size_of(dtype));
  const Buffer buffer{memory.data(), count};
  self.comm->all_reduce({&buffer, 1}, dtype, ReduceOp::avg).wait();
  return {memory.data(), memory.data() + count * size_of(dtype)};
}

std::vector<float> scattered(Rank& self, DType dtype, std::size_t count, bool symmetric, bool accumulate) {
  const std::size_t whole = count * static_cast<std::size_t>(self.world);
  Memory memory = Memory::make(*self.comm, whole * size_of(dtype), symmetric);
  const auto bytes = random_elements(dtype, whole, self.rank);
  std::memcpy(memory.data(), bytes.data(), whole * size_of(dtype));
  std::vector<float> out(count, 0.25f);
  const ConstBuffer from{memory.data(), whole};
  const Buffer to{out.data(), count};
  self.comm->reduce_scatter({&from, 1}, {&to, 1}, dtype, ReduceOp::sum, DType::float32, accumulate).wait();
  return out;
}

}  // namespace

TEST(comm, direct_and_staged_are_equal_to_the_bit) {
  run_worlds(1, 5, [](Rank& self) {
    for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16})
      for (const std::size_t count : {1u, 63u, 5003u})
        EXPECT_TRUE(all_reduced(self, dtype, count, true) == all_reduced(self, dtype, count, false));
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16})
      for (const bool accumulate : {false, true})
        EXPECT_TRUE(scattered(self, dtype, 2503, true, accumulate) == scattered(self, dtype, 2503, false, accumulate));
  });
}

TEST(comm, bf16_is_rounded_once) {
  // Mantissas of 8 bits within 8 binades: f32 and f64 sums are exact, so only the last rounding shows.
  run_worlds(2, 5, [](Rank& self) {
    const std::size_t count = 3001;
    const auto values_of = [&](int rank) {
      std::mt19937 engine(static_cast<unsigned>(rank));
      std::vector<double> values(count);
      for (double& value : values)
        value = std::ldexp(128.0 + static_cast<double>(engine() % 128), static_cast<int>(engine() % 8)) *
                (engine() % 2 ? 1 : -1);
      return values;
    };
    std::vector<double> sum(count);
    for (int r = 0; r < self.world; ++r) {
      const auto values = values_of(r);
      for (std::size_t i = 0; i < count; ++i) sum[i] += values[i];
    }
    const auto wanted = encode(DType::bfloat16, sum);
    for (const bool symmetric : {true, false}) {
      Memory memory = Memory::make(*self.comm, count * 2, symmetric);
      std::memcpy(memory.data(), encode(DType::bfloat16, values_of(self.rank)).data(), count * 2);
      const Buffer buffer{memory.data(), count};
      self.comm->all_reduce({&buffer, 1}, DType::bfloat16, ReduceOp::sum).wait();
      EXPECT_TRUE(std::memcmp(memory.data(), wanted.data(), count * 2) == 0);
    }
  });
}

TEST(comm, accumulate_adds_to_what_is_there) {
  run_worlds(1, 4, [](Rank& self) {
    for (const bool symmetric : {true, false}) {
      const auto fresh = scattered(self, DType::bfloat16, 1001, symmetric, false);
      const auto added = scattered(self, DType::bfloat16, 1001, symmetric, true);
      bool same = true;
      for (std::size_t i = 0; i < fresh.size(); ++i) same &= added[i] == fresh[i] + 0.25f;
      EXPECT_TRUE(same);
    }
  });
}

TEST(comm, a_list_is_as_its_parts) {
  run_worlds(1, 4, [](Rank& self) {
    // Longer than the inline storage, with empty, tiny and large members; the middle ones symmetric or not.
    for (const bool symmetric : {true, false}) {
      std::vector<Memory> memories;
      std::vector<Buffer> buffers;
      for (std::size_t i = 0; i < 40; ++i) {
        const std::size_t count = i == 7 ? 20011 : i % 5 == 0 ? 0 : i * 3;
        memories.push_back(Memory::make(*self.comm, count * 4, symmetric));
        std::memcpy(memories.back().data(),
                    random_elements(DType::float32, count, self.rank + static_cast<int>(i) * 10).data(), count * 4);
        buffers.push_back({memories.back().data(), count});
      }
      std::vector<std::vector<float>> copies;
      std::vector<Buffer> single;
      for (const Buffer& b : buffers) {
        const auto* p = static_cast<const float*>(b.data);
        copies.emplace_back(p, p + b.count);
        copies.back().push_back(0);
        single.push_back({copies.back().data(), b.count});
      }
      self.comm->all_reduce(buffers, DType::float32, ReduceOp::sum, "list").wait();
      for (const Buffer& b : single) self.comm->all_reduce({&b, 1}, DType::float32, ReduceOp::sum).wait();
      for (std::size_t i = 0; i < buffers.size(); ++i)
        EXPECT_TRUE(std::memcmp(buffers[i].data, single[i].data, buffers[i].count * 4) == 0);
    }
    self.comm->all_reduce({}, DType::float32, ReduceOp::sum, "empty list").wait();
  });
}

TEST(comm, lists_of_parts) {
  run_worlds(1, 4, [](Rank& self) {
    const auto ranks = static_cast<std::size_t>(self.world);
    std::vector<std::vector<float>> shards, fulls, back;
    std::vector<ConstBuffer> in, full_in;
    std::vector<Buffer> out, back_out;
    for (std::size_t i = 0; i < 20; ++i) {
      shards.emplace_back(i * 13 + 1, static_cast<float>(self.rank + 1) * static_cast<float>(i + 1));
      fulls.emplace_back(shards.back().size() * ranks);
      back.emplace_back(shards.back().size());
    }
    for (std::size_t i = 0; i < 20; ++i) {
      in.push_back({shards[i].data(), shards[i].size()});
      out.push_back({fulls[i].data(), fulls[i].size()});
      full_in.push_back({fulls[i].data(), fulls[i].size()});
      back_out.push_back({back[i].data(), back[i].size()});
    }
    self.comm->all_gather(in, out, DType::float32).wait();
    self.comm->reduce_scatter(full_in, back_out, DType::float32, ReduceOp::avg, DType::float32, false).wait();
    for (std::size_t i = 0; i < 20; ++i) {
      EXPECT_TRUE(back[i] == shards[i]);  // the average of equal full copies is the shard
      EXPECT_EQ(fulls[i].back(), static_cast<float>(self.world) * static_cast<float>(i + 1));
    }
  });
}

TEST(comm, any_number_of_slots) {
  for (int slots = 1; slots <= 5; ++slots) {
    run_world(3, {30, 4096, slots}, [](Rank& self) {
      std::vector<float> data(30011, static_cast<float>(self.rank + 1));
      const Buffer buffer{data.data(), data.size()};
      for (int i = 0; i < 3; ++i) {
        self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::max).wait();
        self.comm->broadcast({&buffer, 1}, DType::float32, 1).wait();
      }
      EXPECT_TRUE(data == std::vector<float>(30011, 3.0f));
    });
  }
}

TEST(comm, shared_memory_is_one_memory) {
  run_worlds(1, 4, [](Rank& self) {
    auto shared = self.comm->allocate_shared(4096 * 4);
    auto* values = reinterpret_cast<float*>(shared->data());
    const std::size_t part = 4096 / static_cast<std::size_t>(self.world);
    for (std::size_t i = 0; i < part; ++i)
      values[static_cast<std::size_t>(self.rank) * part + i] = static_cast<float>(self.rank);
    self.comm->barrier().wait();  // decision D4: this is the all_gather of parameters
    for (int r = 0; r < self.world; ++r)
      EXPECT_EQ(values[static_cast<std::size_t>(r) * part + part - 1], static_cast<float>(r));
    for (int r = 0; r < self.world; ++r)
      EXPECT_EQ(std::memcmp(shared->peer(r), shared->data(), part * 4 * static_cast<std::size_t>(self.world)), 0);
    const Buffer buffer{values, 4096};
    if (self.world > 1)
      EXPECT_THROW_WITH(self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum), InvalidArgument, "share");
    std::vector<float> sum(part);
    const ConstBuffer in{values, part * static_cast<std::size_t>(self.world)};
    const Buffer out{sum.data(), part};
    self.comm->reduce_scatter({&in, 1}, {&out, 1}, DType::float32, ReduceOp::sum, DType::float32, false).wait();
    EXPECT_EQ(sum[0], static_cast<float>(self.rank * self.world));
    self.comm->barrier().wait();
  });
}

TEST(comm, symmetric_memory_shows_peers) {
  run_worlds(1, 4, [](Rank& self) {
    auto buffer = self.comm->allocate(1000);
    EXPECT_EQ(buffer->nbytes(), 1000u);
    EXPECT_EQ(static_cast<int>(buffer->data()[999]), 0);
    buffer->data()[999] = static_cast<std::byte>(self.rank + 1);
    self.comm->barrier().wait();
    for (int r = 0; r < self.world; ++r) EXPECT_EQ(static_cast<int>(buffer->peer(r)[999]), r + 1);
    EXPECT_THROW_WITH(buffer->peer(self.world), InvalidArgument, "peer(");
    self.comm->barrier().wait();
    EXPECT_EQ(self.comm->allocate(0)->nbytes(), 0u);
  });
}

// A previous allocation at an address must not be mistaken for the present one: two allocations take turns, both new.
TEST(comm, symmetric_memory_comes_and_goes) {
  run_worlds(2, 3, [](Rank& self) {
    constexpr std::size_t kCount = 20000;  // more than fits one shot
    std::shared_ptr<SymmetricBuffer> kept, next;
    for (int turn = 0; turn < 30; ++turn) {
      const std::size_t count = kCount + static_cast<std::size_t>(turn % 4) * 4096;
      next = self.comm->allocate(count * 4);
      if (turn % 3 == 0) kept.reset();
      for (const auto& buffer : {next, kept}) {
        if (!buffer) continue;
        const std::size_t all = buffer->nbytes() / 4;
        auto* values = reinterpret_cast<float*>(buffer->data());
        std::fill_n(values, all, static_cast<float>(self.rank + turn));
        const Buffer whole{values, all};
        self.comm->all_reduce({&whole, 1}, DType::float32, ReduceOp::sum).wait();
        const int sum = self.world * (self.world - 1) / 2 + turn * self.world;
        EXPECT_EQ(std::count(values, values + all, static_cast<float>(sum)), static_cast<std::ptrdiff_t>(all));
        self.comm->barrier().wait();
      }
      kept = next;
    }
  });
}
