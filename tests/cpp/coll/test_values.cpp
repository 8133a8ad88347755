// Results of collectives: every op, dtype, count and placement against sums of small integers, which are exact.
#include "coll/support/comm_values.hpp"

namespace values_test {

using namespace zcomm;
using namespace zcomm::test;

namespace {

void check_all_reduce(Rank& self, DType dtype, std::size_t count, Place place) {
  Memory memory = Memory::make(*self.comm, count * size_of(dtype), symmetric_on(place, self.rank));
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod}) {
    if (op == ReduceOp::avg && (!is_floating(dtype) || dtype == DType::float64)) continue;
    if (op != ReduceOp::sum && count > 1000) continue;
    const auto bytes = encode(dtype, values_of(self.rank, count));
    std::memcpy(memory.data(), bytes.data(), count * size_of(dtype));
    const Buffer buffer{memory.data(), count};
    self.comm->all_reduce({&buffer, 1}, dtype, op).wait();
    CHECK_EQUAL(dtype, memory.data(), reduced(self.world, count, op), "all_reduce");
  }
}

void check_reduce_scatter(Rank& self, DType dtype, std::size_t count, Place place) {
  const auto ranks = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
  Memory in = Memory::make(*self.comm, ranks * count * size_of(dtype), symmetric_on(place, self.rank));
  const auto bytes = encode(dtype, values_of(self.rank, ranks * count));
  std::memcpy(in.data(), bytes.data(), ranks * count * size_of(dtype));
  std::vector<std::byte> out(count * size_of(dtype) + 1);
  const ConstBuffer from{in.data(), ranks * count};
  Buffer to{out.data(), count};
  self.comm->reduce_scatter({&from, 1}, {&to, 1}, dtype, ReduceOp::sum, dtype, false).wait();
  const auto wanted = reduced(self.world, count, ReduceOp::sum, me * count);
  CHECK_EQUAL(dtype, out.data(), wanted, "reduce_scatter");
  EXPECT_TRUE(std::memcmp(in.data(), bytes.data(), ranks * count * size_of(dtype)) == 0);

  to.data = in.data() + me * count * size_of(dtype);  // out aliases in at this rank's chunk
  self.comm->reduce_scatter({&from, 1}, {&to, 1}, dtype, ReduceOp::sum, dtype, false).wait();
  CHECK_EQUAL(dtype, static_cast<std::byte*>(to.data), wanted, "reduce_scatter in place");
}

void check_all_gather(Rank& self, DType dtype, std::size_t count, Place place) {
  const auto ranks = static_cast<std::size_t>(self.world), me = static_cast<std::size_t>(self.rank);
  const std::size_t nbytes = count * size_of(dtype);
  Memory in = Memory::make(*self.comm, nbytes, symmetric_on(place, self.rank));
  Memory out = Memory::make(*self.comm, ranks * nbytes, symmetric_on(place, self.rank));
  std::vector<double> wanted;
  for (int r = 0; r < self.world; ++r) {
    const auto part = values_of(r, count);
    wanted.insert(wanted.end(), part.begin(), part.end());
  }
  const auto bytes = encode(dtype, values_of(self.rank, count));
  std::memcpy(in.data(), bytes.data(), nbytes);
  const ConstBuffer variants[] = {{in.data(), count}, {bytes.data(), count}, {out.data() + me * nbytes, count}};
  for (const ConstBuffer& from : variants) {  // symmetric input, private input, in place
    std::memset(out.data(), 0, ranks * nbytes);
    if (&from == &variants[2]) std::memcpy(out.data() + me * nbytes, bytes.data(), nbytes);
    const Buffer to{out.data(), ranks * count};
    self.comm->all_gather({&from, 1}, {&to, 1}, dtype).wait();
    CHECK_EQUAL(dtype, out.data(), wanted, "all_gather");
  }
}

void check_broadcast(Rank& self, DType dtype, std::size_t count, Place place) {
  Memory memory = Memory::make(*self.comm, count * size_of(dtype), symmetric_on(place, self.rank));
  for (const int root : {0, self.world - 1}) {
    const auto bytes = encode(dtype, values_of(self.rank, count));
    std::memcpy(memory.data(), bytes.data(), count * size_of(dtype));
    const Buffer buffer{memory.data(), count};
    self.comm->broadcast({&buffer, 1}, dtype, root).wait();
    CHECK_EQUAL(dtype, memory.data(), values_of(root, count), "broadcast");
  }
}

}  // namespace

TEST(comm, all_reduce_values) {
  run_worlds(1, 5, [](Rank& self) { for_each_case(self, check_all_reduce); });
}
TEST(comm, reduce_scatter_values) {
  run_worlds(1, 5, [](Rank& self) { for_each_case(self, check_reduce_scatter); });
}
TEST(comm, all_gather_values) {
  run_worlds(1, 5, [](Rank& self) { for_each_case(self, check_all_gather); });
}
TEST(comm, broadcast_values) {
  run_worlds(1, 5, [](Rank& self) { for_each_case(self, check_broadcast); });
}

TEST(comm, nine_ranks) {
  run_world(9, small_slots(), [](Rank& self) {
    for (const Place place : kPlaces) {
      check_all_reduce(self, DType::float32, 1000, place);
      check_reduce_scatter(self, DType::bfloat16, 1000, place);
      check_all_gather(self, DType::int64, 77, place);
      check_broadcast(self, DType::float64, 1000, place);
    }
  });
}

TEST(comm, bytes_travel_unchanged) {  // dtypes that are only moved
  run_worlds(1, 3, [](Rank& self) {
    for (const DType dtype : {DType::int8, DType::uint8, DType::boolean}) {
      check_broadcast(self, dtype, 1000, Place::mixed);
      check_all_gather(self, dtype, 77, Place::private_);
    }
  });
}

TEST(comm, barrier_orders) {
  std::atomic<int> before{0};
  run_world(5, small_slots(), [&](Rank& self) {
    for (int round = 1; round <= 20; ++round) {
      ++before;
      self.comm->barrier().wait();
      EXPECT_GE(before.load(), 5 * round);
      self.comm->barrier().wait();
    }
  });
}

}  // namespace values_test
