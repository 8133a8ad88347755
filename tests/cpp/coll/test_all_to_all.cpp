// all_to_all: even, uneven and sparse splits on every path, and the check that compares sent and expected counts.
#include <algorithm>
#include <mutex>

#include "coll/support/comm_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

/// Elements that rank `from` sends to rank `to` in a world.
using Split = std::function<std::size_t(int from, int to, int world)>;

const Split kSplits[] = {
    [](int, int, int) { return 0; },
    [](int, int, int) { return 1; },
    [](int, int, int) { return 3001; },
    [](int from, int to, int) { return static_cast<std::size_t>((from * 3 + to * 5) % 7); },
    [](int from, int to, int) { return static_cast<std::size_t>((from * 3 + to * 5) % 7 * 1009); },
    [](int from, int to, int world) { return to == (from + 1) % world ? 20011u : 0u; },  // sparse: to the next
    [](int from, int to, int) { return from == 0 && to != 0 ? 9001u : 0u; },             // one sends to all
    [](int from, int to, int) { return from != 0 && to == 0 ? 9001u : 0u; },             // one receives from all
    [](int from, int to, int) { return from == to ? 5003u : 0u; },                       // nothing leaves its rank
    [](int from, int to, int) { return from == 0 && to == 0 ? 0u : static_cast<std::size_t>(1) << (from + to) % 12; },
};

std::byte sent(int from, int to, std::size_t i) {
  return static_cast<std::byte>((i * 131 + i / 251 + static_cast<std::size_t>(from * 17 + to * 29)) % 251 + 1);
}

/// The parts of one side, one after the other with a gap, all of them in one memory.
struct Side {
  Memory memory;
  std::vector<std::size_t> begins, nbytes;

  static Side make(Rank& self, bool symmetric, std::size_t room, const std::function<std::size_t(int)>& nbytes_of) {
    Side side{Memory::make(*self.comm, room, symmetric), {}, {}};
    std::size_t at = 0;
    for (int q = 0; q < self.world; ++q) {
      side.begins.push_back(at);
      side.nbytes.push_back(nbytes_of(q));
      at += side.nbytes.back() + 8;
    }
    return side;
  }
  std::byte* part(int q) { return memory.data() + begins[static_cast<std::size_t>(q)]; }
};

void check_all_to_all(Rank& self, const Split& split, DType dtype, bool in_symmetric, bool out_symmetric) {
  const std::size_t size = size_of(dtype);
  std::size_t most = 0;  // of one part
  for (int a = 0; a < self.world; ++a)
    for (int b = 0; b < self.world; ++b) most = std::max(most, split(a, b, self.world));
  const std::size_t room = (most * size + 8) * static_cast<std::size_t>(self.world);
  Side in = Side::make(self, in_symmetric, room, [&](int q) { return split(self.rank, q, self.world) * size; });
  Side out = Side::make(self, out_symmetric, room, [&](int q) { return split(q, self.rank, self.world) * size; });
  std::vector<ConstBuffer> from;
  std::vector<Buffer> to;
  std::memset(out.memory.data(), 0, room);
  for (int q = 0; q < self.world; ++q) {
    const auto i = static_cast<std::size_t>(q);
    for (std::size_t b = 0; b < in.nbytes[i]; ++b) in.part(q)[b] = sent(self.rank, q, b);
    from.push_back({in.nbytes[i] == 0 ? nullptr : in.part(q), in.nbytes[i] / size});
    to.push_back({out.nbytes[i] == 0 ? nullptr : out.part(q), out.nbytes[i] / size});
  }
  self.comm->all_to_all(from, to, dtype, "exchange").wait();
  bool same = true, gaps = true;
  for (int q = 0; q < self.world; ++q) {
    const std::size_t n = out.nbytes[static_cast<std::size_t>(q)];
    for (std::size_t b = 0; b < n; ++b) same &= out.part(q)[b] == sent(q, self.rank, b);
    for (std::size_t b = n; b < n + 8; ++b) gaps &= out.part(q)[b] == std::byte{0};
  }
  if (!same || !gaps)
    fail(__FILE__, __LINE__,
         "rank " + std::to_string(self.rank) + "/" + std::to_string(self.world) + " split " +
             std::to_string(&split - kSplits) + (in_symmetric ? " in" : "") + (out_symmetric ? " out" : "") +
             (same ? " wrote beside its parts" : " wrong bytes"));
}

/// Equal counts for every pair but one.
struct Odd {
  int from, to;
  std::size_t sent, expected;
};

std::string mismatch_of(Rank& self, const std::vector<Odd>& odds, std::size_t usual) {
  std::vector<std::byte> memory(4096);
  std::vector<ConstBuffer> in(static_cast<std::size_t>(self.world), {memory.data(), usual});
  std::vector<Buffer> out;
  for (int q = 0; q < self.world; ++q) out.push_back({memory.data() + 2048 + 64 * q, usual});
  for (const Odd& odd : odds) {
    if (self.rank == odd.from) in[static_cast<std::size_t>(odd.to)].count = odd.sent;
    if (self.rank == odd.to) out[static_cast<std::size_t>(odd.from)].count = odd.expected;
  }
  try {
    self.comm->all_to_all(in, out, DType::uint8, "tokens").wait();
  } catch (const CollectiveMismatch& error) {
    for (const std::byte b : memory) EXPECT_TRUE(b == std::byte{0});
    return error.what();
  }
  fail(__FILE__, __LINE__, "no mismatch");
  return "";
}

void expect_split_mismatch(int world, const std::vector<Odd>& odds, const std::vector<std::string>& parts) {
  std::mutex mutex;
  std::vector<std::string> messages;
  run_world(world, small_slots(), [&](Rank& self) {
    if (self.world > 1) self.comm->barrier().wait();
    const std::string message = mismatch_of(self, odds, 3);
    EXPECT_THROW_WITH(self.comm->barrier("afterwards").wait(), CollectiveMismatch, "unusable since");
    const std::lock_guard lock(mutex);
    messages.push_back(message);
  });
  EXPECT_EQ(messages.size(), static_cast<std::size_t>(world));
  for (const auto& message : messages) EXPECT_EQ(message, messages[0]);
  for (const auto& part : parts)
    if (messages.empty() || messages[0].find(part) == std::string::npos)
      fail(__FILE__, __LINE__, "message lacks '" + part + "': " + (messages.empty() ? "" : messages[0]));
}

}  // namespace

TEST(comm_exchange, all_to_all_values) {
  run_worlds(1, 5, [](Rank& self) {
    for (const Split& split : kSplits)
      for (const bool in_symmetric : {false, true})
        for (const bool out_symmetric : {false, true})
          check_all_to_all(self, split, DType::float32, in_symmetric, out_symmetric);
  });
}

TEST(comm_exchange, mixed_between_ranks) {
  run_worlds(2, 5, [](Rank& self) {
    for (const Split& split : kSplits) {
      check_all_to_all(self, split, DType::bfloat16, self.rank % 2 == 0, self.rank % 2 == 1);
      check_all_to_all(self, split, DType::bfloat16, true, self.rank == 0);
    }
  });
}

TEST(comm_exchange, every_dtype) {
  run_worlds(1, 3, [](Rank& self) {
    for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::int8,
                              DType::uint8, DType::int32, DType::int64, DType::boolean})
      for (const bool symmetric : {false, true}) check_all_to_all(self, kSplits[4], dtype, symmetric, symmetric);
  });
}

TEST(comm_exchange, six_to_nine_ranks) {
  run_worlds(6, 9, [](Rank& self) {
    for (const std::size_t i : {1u, 4u, 5u, 9u})
      for (const bool symmetric : {false, true})
        check_all_to_all(self, kSplits[i], DType::float32, symmetric, symmetric);
  });
}

TEST(comm_exchange, large_parts) {  // past the cache, through slots of the usual size
  run_world(3, {}, [](Rank& self) {
    const Split split = [](int from, int to, int) { return 500000u + static_cast<unsigned>(from * 1000 + to * 77); };
    check_all_to_all(self, split, DType::float32, false, false);
    check_all_to_all(self, split, DType::float32, true, false);
  });
}

TEST(comm_exchange, any_number_of_slots) {
  for (int slots = 1; slots <= 5; ++slots) {
    run_world(3, {30, 4096, slots}, [](Rank& self) {
      for (int round = 0; round < 2; ++round)
        for (const std::size_t i : {1u, 4u, 5u, 7u})
          for (const bool symmetric : {false, true}) {
            check_all_to_all(self, kSplits[i], DType::float32, symmetric, false);
            std::vector<float> data(3001, 1.0f);  // the other pipeline on the same slots
            const Buffer buffer{data.data(), data.size()};
            self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum).wait();
            EXPECT_TRUE(data == std::vector<float>(3001, 3.0f));
          }
    });
  }
}

TEST(comm_exchange, dropped_memory) {
  run_world(3, small_slots(), [](Rank& self) {
    // Rank 1 sends from an allocation that the others have dropped: the slots serve.
    auto first = self.comm->allocate(1 << 16), second = self.comm->allocate(1 << 16);
    if (self.rank != 1) second.reset();
    auto& mine = self.rank == 1 ? second : first;
    std::fill(mine->data(), mine->data() + (1 << 16), static_cast<std::byte>(self.rank + 1));
    std::vector<std::byte> got(60000);
    std::vector<ConstBuffer> in;
    std::vector<Buffer> out;
    for (std::size_t q = 0; q < 3; ++q) {
      in.push_back({mine->data() + q * 20000, 20000});
      out.push_back({got.data() + q * 20000, 20000});
    }
    for (int round = 0; round < 3; ++round) {
      self.comm->all_to_all(in, out, DType::uint8).wait();
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i] == static_cast<std::byte>(i / 20000 + 1));
      std::fill(got.begin(), got.end(), std::byte{0});
    }
  });
}

TEST(comm_exchange, splits_that_differ) {
  expect_split_mismatch(3, {{1, 2, 5, 7}},
                        {"all_to_all uint8 'tokens'", "rank 1 sends 5 elements to rank 2", "which expects 7"});
  expect_split_mismatch(3, {{0, 2, 0, 3}}, {"rank 0 sends 0 elements to rank 2, which expects 3"});
  expect_split_mismatch(3, {{2, 0, 3, 0}}, {"rank 2 sends 3 elements to rank 0, which expects 0"});
  expect_split_mismatch(1, {{0, 0, 1, 2}}, {"rank 0 sends 1 elements to rank 0, which expects 2"});
  // Totals agree, pairs do not.
  expect_split_mismatch(
      4, {{0, 1, 4, 3}, {0, 2, 3, 4}},
      {"rank 0 sends 4 elements to rank 1, which expects 3", "rank 0 sends 3 elements to rank 2, which expects 4"});
  expect_split_mismatch(3, {{0, 1, 1, 2}, {1, 0, 2, 1}}, {"rank 0 sends 1", "rank 1 sends 2"});
  std::vector<Odd> many;
  for (int from = 0; from < 9; ++from) many.push_back({from, 8 - from, 1, 2});
  expect_split_mismatch(9, many, {"rank 0 sends 1 elements to rank 8, which expects 2", "and 5 more"});
}

TEST(comm_exchange, splits_that_differ_after_full_slots) {
  run_world(3, small_slots(), [](Rank& self) {
    for (int i = 0; i < 3; ++i) check_all_to_all(self, kSplits[4], DType::float32, false, false);
    const std::string message = mismatch_of(self, {{0, 1, 2, 1}}, 3);
    EXPECT_TRUE(message.find("rank 0 sends 2 elements to rank 1, which expects 1") != std::string::npos);
  });
}

TEST(comm_exchange, arguments) {
  run_worlds(1, 3, [](Rank& self) {
    std::vector<float> values(16);
    const auto ranks = static_cast<std::size_t>(self.world);
    std::vector<ConstBuffer> in(ranks, {values.data(), 1}), more(ranks + 1, {values.data(), 1});
    std::vector<Buffer> out(ranks, {values.data() + 8, 1}), fewer(ranks - 1, {values.data() + 8, 1});
    EXPECT_THROW_WITH(self.comm->all_to_all(more, out, DType::float32), InvalidArgument,
                      std::to_string(ranks + 1) + " inputs");
    EXPECT_THROW_WITH(self.comm->all_to_all(in, fewer, DType::float32), InvalidArgument,
                      std::to_string(ranks - 1) + " outputs");
    in[0] = {nullptr, 2};
    EXPECT_THROW_WITH(self.comm->all_to_all(in, out, DType::float32), InvalidArgument, "null");
    self.comm->barrier().wait();
  });
}
