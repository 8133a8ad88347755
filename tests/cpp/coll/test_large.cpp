// Counts over 2^31 elements. Takes minutes and up to 7 GiB: runs only if ZCOMM_TEST_LARGE is set.
#include <cstdlib>

#include "coll/support/comm_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr std::size_t kCount = (std::size_t{1} << 31) + 4097;

/// Runs two ranks with the default slots, if wanted.
void run_large(const std::function<void(Rank&)>& body) {
  if (std::getenv("ZCOMM_TEST_LARGE") == nullptr) {
    std::cout << "skipped: set ZCOMM_TEST_LARGE=1 (7 GiB of memory)\n";
    return;
  }
  run_world(2, {300}, body);
}

std::uint8_t value(int rank, std::size_t i) {
  const std::uint64_t x = (i + static_cast<std::size_t>(rank) * 977) * 0x9e3779b97f4a7c15u;
  return static_cast<std::uint8_t>(x >> 56);
}

/// Bytes without the zeroing of a vector.
struct Bytes {
  std::unique_ptr<std::uint8_t[]> own;
  std::shared_ptr<SymmetricBuffer> symmetric;
  std::uint8_t* data() { return symmetric ? reinterpret_cast<std::uint8_t*>(symmetric->data()) : own.get(); }
};

Bytes make(Rank& self, std::size_t count, bool symmetric) {
  if (symmetric) return {nullptr, self.comm->allocate(count)};
  return {std::unique_ptr<std::uint8_t[]>(new std::uint8_t[count]), nullptr};
}

void fill(std::uint8_t* data, std::size_t count, int rank, std::size_t begin = 0) {
  for (std::size_t i = 0; i < count; ++i) data[i] = value(rank, begin + i);
}

template <class Wanted>
void check(const std::uint8_t* data, std::size_t count, const Wanted& wanted, const char* what) {
  for (std::size_t i = 0; i < count; ++i)
    if (data[i] != wanted(i)) return fail(__FILE__, __LINE__, std::string(what) + ": element " + std::to_string(i));
}

std::uint8_t sum(std::size_t i) { return static_cast<std::uint8_t>(value(0, i) + value(1, i)); }

}  // namespace

TEST(comm_large, in_place_operations) {
  run_large([](Rank& self) {
    for (const bool symmetric : {false, true}) {
      Bytes bytes = make(self, kCount, symmetric);
      const Buffer buffer{bytes.data(), kCount};
      fill(bytes.data(), kCount, self.rank);
      self.comm->all_reduce({&buffer, 1}, DType::uint8, ReduceOp::sum).wait();
      check(bytes.data(), kCount, sum, "all_reduce");
      fill(bytes.data(), kCount, self.rank);
      self.comm->reduce({&buffer, 1}, DType::int8, ReduceOp::sum, 1).wait();
      check(bytes.data(), kCount, [&](std::size_t i) { return self.rank == 1 ? sum(i) : value(0, i); }, "reduce");
      fill(bytes.data(), kCount, self.rank);
      self.comm->broadcast({&buffer, 1}, DType::uint8, 1).wait();
      check(bytes.data(), kCount, [](std::size_t i) { return value(1, i); }, "broadcast");
    }
  });
}

TEST(comm_large, operations_on_parts) {
  run_large([](Rank& self) {
    const std::size_t part = kCount / 2 + 3;
    const std::size_t begin = static_cast<std::size_t>(self.rank) * part;
    for (const bool symmetric : {false, true}) {
      Bytes whole = make(self, 2 * part, symmetric), mine = make(self, part, false);
      const auto in_all = [&](std::size_t i) { return i < part ? value(0, i) : value(1, i - part); };
      const Buffer full{whole.data(), 2 * part}, shard{mine.data(), part};
      const ConstBuffer full_in{whole.data(), 2 * part}, shard_in{mine.data(), part};
      const std::size_t side = self.rank == 1 ? 1 : 0;
      fill(whole.data(), 2 * part, self.rank);
      self.comm->reduce_scatter({&full_in, 1}, {&shard, 1}, DType::uint8, ReduceOp::sum, DType::uint8, false).wait();
      check(mine.data(), part, [&](std::size_t i) { return sum(begin + i); }, "reduce_scatter");
      self.comm->scatter({&full_in, side}, {&shard, 1}, DType::uint8, 1).wait();
      check(mine.data(), part, [&](std::size_t i) { return value(1, begin + i); }, "scatter");
      fill(mine.data(), part, self.rank);
      self.comm->all_gather({&shard_in, 1}, {&full, 1}, DType::uint8).wait();
      check(whole.data(), 2 * part, in_all, "all_gather");
      std::memset(whole.data(), 0, 2 * part);
      self.comm->gather({&shard_in, 1}, {&full, side}, DType::uint8, 1).wait();
      if (side == 1) check(whole.data(), 2 * part, in_all, "gather");
    }
  });
}

TEST(comm_large, all_to_all_of_one_large_part) {
  run_large([](Rank& self) {
    for (const bool symmetric : {false, true}) {
      Bytes bytes = make(self, kCount + 5, symmetric);
      const bool gives = self.rank == 0;
      if (gives) fill(bytes.data(), kCount, 0);
      std::uint8_t &own_in = bytes.data()[kCount], &own_out = bytes.data()[kCount + 1];
      own_in = static_cast<std::uint8_t>(self.rank + 1), own_out = 0;
      std::vector<ConstBuffer> in(2, {nullptr, 0});
      std::vector<Buffer> out(2, {nullptr, 0});
      in[static_cast<std::size_t>(self.rank)] = {&own_in, 1};
      out[static_cast<std::size_t>(self.rank)] = {&own_out, 1};
      if (gives)
        in[1] = {bytes.data(), kCount};
      else
        out[0] = {bytes.data(), kCount};
      self.comm->all_to_all(in, out, DType::int8).wait();
      EXPECT_EQ(own_out, own_in);
      check(bytes.data(), kCount, [](std::size_t i) { return value(0, i); }, "all_to_all");
    }
  });
}
