// Results of collectives, checked on any communicator: every op and dtype against sums of small integers.
#pragma once

#include <cmath>
#include <cstdlib>

#include "coll/support/comm_world.hpp"

namespace zcomm::test::links {

inline constexpr DType kDTypes[] = {DType::float32, DType::float64, DType::bfloat16, DType::float16, DType::int32,
                                    DType::int64,   DType::int8,    DType::uint8,    DType::boolean};
inline constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod};

inline double value_of(int rank, std::size_t i, DType dtype) {
  const auto value = static_cast<double>((i * 7 + static_cast<std::size_t>(rank) * 3) % 5);
  return dtype == DType::boolean ? std::min(std::floor(value / 2), 1.0) : dtype == DType::uint8 ? value : value - 1;
}

inline std::vector<double> values_of(int rank, std::size_t count, DType dtype, std::size_t begin = 0) {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = value_of(rank, begin + i, dtype);
  return values;
}

inline std::vector<double> reduced(int world, std::size_t count, DType dtype, ReduceOp op, std::size_t begin = 0) {
  std::vector<double> result = values_of(0, count, dtype, begin);
  for (int r = 1; r < world; ++r) {
    for (std::size_t i = 0; i < count; ++i) {
      const double next = value_of(r, begin + i, dtype);
      if (op == ReduceOp::min)
        result[i] = std::min(result[i], next);
      else if (op == ReduceOp::max)
        result[i] = std::max(result[i], next);
      else if (op == ReduceOp::prod)
        result[i] *= next;
      else
        result[i] += next;
    }
  }
  for (double& value : result) {
    if (dtype == DType::boolean) value = std::min(value, 1.0);
    if (op == ReduceOp::avg)
      value = dtype == DType::float64 ? value / world
                                      : static_cast<double>(static_cast<float>(value) / static_cast<float>(world));
  }
  return result;
}

struct Sample {
  DType dtype;
  ReduceOp op;
  std::size_t count;
};

inline void expect_equal(const char* what, const Rank& self, const Sample& c, const std::byte* got,
                         const std::vector<double>& wanted) {
  if (equal(c.dtype, got, wanted)) return;
  fail(__FILE__, __LINE__,
       std::string(what) + " rank " + std::to_string(self.rank) + "/" + std::to_string(self.world) + " " +
           std::string(name_of(c.dtype)) + " " + std::string(name_of(c.op)) + " count " + std::to_string(c.count));
}

/// Two tensors, the second with the rest; each a list of its own in memory.
struct List {
  std::size_t first, second;
  explicit List(std::size_t count) : first(count / 3), second(count - count / 3) {}
};

inline void check_all_reduce(Rank& self, const Sample& c) {
  auto data = encode(c.dtype, values_of(self.rank, c.count, c.dtype));
  const List list(c.count);
  const Buffer buffers[] = {{data.data(), list.first}, {data.data() + list.first * size_of(c.dtype), list.second}};
  self.comm->all_reduce(buffers, c.dtype, c.op).wait();
  expect_equal("all_reduce", self, c, data.data(), reduced(self.world, c.count, c.dtype, c.op));
}

inline void check_reduce(Rank& self, const Sample& c) {
  for (int root = 0; root < self.world; root += std::max(1, self.world - 1)) {
    const auto input = values_of(self.rank, c.count, c.dtype);
    auto data = encode(c.dtype, input);
    const Buffer buffer{data.data(), c.count};
    self.comm->reduce({&buffer, 1}, c.dtype, c.op, root).wait();
    expect_equal("reduce", self, c, data.data(),
                 self.rank == root ? reduced(self.world, c.count, c.dtype, c.op) : input);
  }
}

inline void check_reduce_scatter(Rank& self, const Sample& c) {
  const auto world = static_cast<std::size_t>(self.world), rank = static_cast<std::size_t>(self.rank);
  const std::size_t size = size_of(c.dtype);
  const List list(c.count);
  const auto in = encode(c.dtype, values_of(self.rank, world * c.count, c.dtype));
  auto out = encode(c.dtype, std::vector<double>(c.count, 1));
  const ConstBuffer ins[] = {{in.data(), world * list.first},
                             {in.data() + world * list.first * size, world * list.second}};
  const Buffer outs[] = {{out.data(), list.first}, {out.data() + list.first * size, list.second}};
  self.comm->reduce_scatter(ins, outs, c.dtype, c.op, c.dtype, false).wait();
  auto wanted = reduced(self.world, list.first, c.dtype, c.op, rank * list.first);
  const auto rest = reduced(self.world, list.second, c.dtype, c.op, world * list.first + rank * list.second);
  wanted.insert(wanted.end(), rest.begin(), rest.end());
  expect_equal("reduce_scatter", self, c, out.data(), wanted);
}

/// Everything that only moves.
inline void check_moves(Rank& self, const Sample& c) {
  const auto world = static_cast<std::size_t>(self.world), rank = static_cast<std::size_t>(self.rank);
  const std::size_t size = size_of(c.dtype);
  const int root = self.world - 1;
  const auto mine = encode(c.dtype, values_of(self.rank, c.count, c.dtype));
  std::vector<double> all;
  for (int r = 0; r < self.world; ++r) {
    const auto theirs = values_of(r, c.count, c.dtype);
    all.insert(all.end(), theirs.begin(), theirs.end());
  }
  auto whole = encode(c.dtype, std::vector<double>(world * c.count, 0));
  const ConstBuffer in{mine.data(), c.count};
  const Buffer out{whole.data(), world * c.count};
  self.comm->all_gather({&in, 1}, {&out, 1}, c.dtype).wait();
  expect_equal("all_gather", self, c, whole.data(), all);

  std::memcpy(whole.data() + rank * c.count * size, mine.data(), c.count * size);
  const ConstBuffer aliased{whole.data() + rank * c.count * size, c.count};
  self.comm->all_gather({&aliased, 1}, {&out, 1}, c.dtype).wait();
  expect_equal("all_gather in place", self, c, whole.data(), all);

  const bool is_root = self.rank == root;
  std::fill(whole.begin(), whole.end(), std::byte{0});
  self.comm->gather({&in, 1}, {&out, is_root ? 1u : 0u}, c.dtype, root).wait();
  if (is_root) expect_equal("gather", self, c, whole.data(), all);

  auto part = encode(c.dtype, std::vector<double>(c.count, 0));
  const ConstBuffer source{whole.data(), world * c.count};
  const Buffer target{part.data(), c.count};
  self.comm->scatter({&source, is_root ? 1u : 0u}, {&target, 1}, c.dtype, root).wait();
  expect_equal("scatter", self, c, part.data(), values_of(self.rank, c.count, c.dtype));

  auto sent = mine;
  const Buffer both{sent.data(), c.count};
  self.comm->broadcast({&both, 1}, c.dtype, root).wait();
  expect_equal("broadcast", self, c, sent.data(), values_of(root, c.count, c.dtype));
}

inline void check_all_to_all(Rank& self, const Sample& c) {
  const auto world = static_cast<std::size_t>(self.world);
  const auto count = [&](std::size_t from, std::size_t to) { return c.count * ((from + 2 * to) % 3) / 2; };
  const auto rank = static_cast<std::size_t>(self.rank);
  std::vector<std::vector<std::byte>> sent(world), got(world);
  std::vector<ConstBuffer> in;
  std::vector<Buffer> out;
  for (std::size_t q = 0; q < world; ++q) {
    sent[q] = encode(c.dtype, values_of(self.rank, count(rank, q), c.dtype, q));
    got[q] = encode(c.dtype, std::vector<double>(count(q, rank), 0));
    in.push_back({sent[q].data(), count(rank, q)});
    out.push_back({got[q].data(), count(q, rank)});
  }
  self.comm->all_to_all(in, out, c.dtype).wait();
  for (std::size_t q = 0; q < world; ++q)
    expect_equal("all_to_all", self, c, got[q].data(), values_of(static_cast<int>(q), count(q, rank), c.dtype, rank));
}

inline void check_all(Rank& self, std::initializer_list<std::size_t> counts) {
  for (const std::size_t count : counts) {
    for (const DType dtype : kDTypes) {
      for (const ReduceOp op : kOps) {
        if (op == ReduceOp::avg && !is_floating(dtype)) continue;
        const Sample c{dtype, op, count};
        check_all_reduce(self, c);
        if (op == ReduceOp::min && count > 1) continue;  // as max
        check_reduce(self, c);
        check_reduce_scatter(self, c);
      }
      check_moves(self, {dtype, ReduceOp::sum, count});
      check_all_to_all(self, {dtype, ReduceOp::sum, count});
    }
  }
}

/// For one algorithm; worlds of threads start after it is set.
struct Algorithm {
  explicit Algorithm(const char* name) { ::setenv("ZCOMM_LINK_ALGO", name, 1); }
  ~Algorithm() { ::unsetenv("ZCOMM_LINK_ALGO"); }
};

}  // namespace zcomm::test::links
