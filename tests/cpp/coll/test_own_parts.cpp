// reduce_scatter with own elements stored elsewhere: the same bits as from the buffer, on every path.
#include <cmath>

#include "coll/support/device_world.hpp"
#include "coll/support/hierarchical_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

using Parts = std::vector<OwnPart>;

struct Scattered {
  Rank& self;
  DType dtype;
  std::size_t count;  // of a rank's chunk
  bool accumulate;

  std::size_t whole() const { return count * static_cast<std::size_t>(self.world); }
  std::size_t chunk_nbytes() const { return count * size_of(dtype); }

  std::vector<std::byte> values() const {
    const auto floats = random_floats(whole(), 7u + static_cast<unsigned>(self.rank));
    return encode(dtype, std::vector<double>(floats.begin(), floats.end()));
  }

  /// The result with the own parts `at` ([begin, end) of the chunk) elsewhere, and NaN where they belong.
  std::vector<float> run(bool symmetric, const std::vector<std::pair<std::size_t, std::size_t>>& at) const {
    const auto bytes = values();
    const auto nan = encode(dtype, std::vector<double>(count, std::nan("")));
    const std::size_t element = size_of(dtype), begin = static_cast<std::size_t>(self.rank) * chunk_nbytes();
    Memory memory = Memory::make(*self.comm, whole() * element, symmetric);
    std::memcpy(memory.data(), bytes.data(), whole() * element);
    std::vector<std::vector<std::byte>> elsewhere;
    Parts own;
    for (const auto& [first, last] : at) {
      const auto* from = bytes.data() + begin + first * element;
      elsewhere.emplace_back(from, from + (last - first) * element);
      elsewhere.back().emplace_back();
      std::memcpy(memory.data() + begin + first * element, nan.data(), (last - first) * element);
      own.push_back({first, last - first, elsewhere.back().data()});
    }
    std::vector<float> out(count, 0.5f);
    const ConstBuffer in{memory.data(), whole()};
    const Buffer to{out.data(), count};
    self.comm
        ->reduce_scatter({&in, 1}, {&to, 1}, dtype, ReduceOp::avg, DType::float32, accumulate,
                         {"own", self.rank % 2 == 0}, own)
        .wait();
    return out;
  }
};

/// Parts differ by rank: they are not compared.
void check_equal_bits(Rank& self, const std::vector<bool>& kinds_of_memory) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    for (const std::size_t count : {5u, 320u, 20001u})
      for (const bool accumulate : {false, true})
        for (const bool symmetric : kinds_of_memory) {
          const Scattered scattered{self, dtype, count, accumulate};
          const auto wanted = scattered.run(symmetric, {});
          const std::size_t third = count / 3, shift = static_cast<std::size_t>(self.rank) % 2;
          EXPECT_TRUE(scattered.run(symmetric, {{0, count}}) == wanted);
          EXPECT_TRUE(scattered.run(symmetric, {{shift, third}, {third, third + 1}, {count - 1, count}}) == wanted);
        }
}

}  // namespace

TEST(own_parts, are_read_where_they_are) {
  run_worlds(1, 4, [](Rank& self) {
    EXPECT_TRUE(self.comm->reads_own_parts());
    check_equal_bits(self, {true, false});
  });
}

TEST(own_parts, stay_where_they_are_on_symmetric_memory) {
  run_world(2, small_slots(), [](Rank& self) {
    std::vector<float> elsewhere(64, 1.0f), out(64);
    Memory memory = Memory::make(*self.comm, 128 * 4, true);
    auto* values = reinterpret_cast<float*>(memory.data());
    std::fill(values, values + 128, 2.0f);
    const OwnPart own{0, 64, elsewhere.data()};
    const ConstBuffer in{values, 128};
    const Buffer to{out.data(), 64};
    self.comm
        ->reduce_scatter({&in, 1}, {&to, 1}, DType::float32, ReduceOp::sum, DType::float32, false, kBlocking, {&own, 1})
        .wait();
    EXPECT_EQ(out, std::vector<float>(64, 3.0f));
    EXPECT_EQ(values[self.rank * 64], 2.0f);  // nothing was copied
  });
}

TEST(own_parts, large_results_are_streamed) {
  run_world(2, CommOptions{30, 256 << 10}, [](Rank& self) {
    const std::size_t count = (4 << 20) / 4 + 77;  // each range too small for the pool of threads
    const Scattered scattered{self, DType::float32, count, false};
    EXPECT_TRUE(scattered.run(true, {{1, count / 2}, {count / 2 + 3, count - 5}}) == scattered.run(false, {}));
  });
}

TEST(own_parts, over_links_and_between_hosts) {
  run_link_world(3, {}, [](Rank& self) {
    EXPECT_TRUE(!self.comm->reads_own_parts());
    check_equal_bits(self, {false});
  });
  run_hosts({0, 0, 1, 1}, 30, [](HierarchicalRank& self) { check_equal_bits(self, {true}); });
}

TEST(own_parts, errors_name_what_is_wrong) {
  run_world(2, small_slots(), [](Rank& self) {
    std::vector<float> values(16), out(8), elsewhere(8);
    const ConstBuffer in{values.data(), 16};
    const Buffer to{out.data(), 8};
    const auto call = [&](const Parts& own, std::size_t buffers = 1) {
      const std::vector<ConstBuffer> from(buffers, in);
      const std::vector<Buffer> into(buffers, to);
      self.comm->reduce_scatter(from, into, DType::float32, ReduceOp::sum, DType::float32, false, kBlocking, own);
    };
    const float* at = elsewhere.data();
    EXPECT_THROW_WITH(call({{4, 5, at}}), InvalidArgument, "own part 0: elements [4, 9): expected parts of [0, 8)");
    EXPECT_THROW_WITH(call({{0, 4, at}, {3, 2, at}}), InvalidArgument, "own part 1: elements [3, 5)");
    EXPECT_THROW_WITH(call({{9, 0, at}}), InvalidArgument, "own part 0");
    EXPECT_THROW_WITH(call({{1, ~std::size_t{0}, at}}), InvalidArgument, "own part 0");
    EXPECT_THROW_WITH(call({{0, 4, nullptr}}), InvalidArgument, "own part 0 has 4 elements at a null pointer");
    EXPECT_THROW_WITH(call({{0, 4, out.data() + 7}}), InvalidArgument, "out must lie outside of in and of them");
    const Buffer inside{values.data() + 8, 8};
    const OwnPart part{0, 4, at};
    EXPECT_THROW_WITH(self.comm->reduce_scatter({&in, 1}, {&inside, 1}, DType::float32, ReduceOp::sum, DType::float32,
                                                false, kBlocking, {&part, 1}),
                      InvalidArgument, "out must lie outside of in and of them");
    EXPECT_THROW_WITH(call({{0, 4, at}}, 2), InvalidArgument, "own parts of a list of 2 buffers");
    self.comm->barrier().wait();  // nothing of it has reached the others
  });
  run_device_world(2, {}, [](DeviceRank& self) {
    float value = 0;
    const OwnPart own{0, 1, &value};
    const ConstBuffer in{&value, 2};
    const Buffer to{&value, 1};
    EXPECT_TRUE(!self.comm->reads_own_parts());
    EXPECT_THROW_WITH(self.comm->reduce_scatter({&in, 1}, {&to, 1}, DType::float32, ReduceOp::sum, DType::float32,
                                                false, kBlocking, {&own, 1}),
                      Unsupported, "own parts of buffers on a device");
  });
}
