// reduce_scatter of backend nccl: the CPU's bits, in passes of limited memory; NCCL's own sum for more ranks than a
// kernel takes.
#include <cstring>
#include <numeric>

#include "coll/cuda/part_pieces.hpp"
#include "coll/support/error_checks.hpp"
#include "coll/support/nccl_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

using coll::Item;
using coll::PartPiece;
using coll::PartPieces;

/// Each element of each item once, in order; pieces lie apart within the buffer.
void check_pieces(const std::vector<std::size_t>& counts, int world, std::size_t size, std::size_t most) {
  std::vector<Item> items(counts.size());
  for (std::size_t i = 0; i < counts.size(); ++i) items[i].count = counts[i];
  const std::size_t room = PartPieces::buffer_nbytes(items, world, size, most);
  PartPieces passes(items, world, size, room);
  std::vector<std::size_t> done(counts.size(), 0);
  for (auto pieces = passes.next(); !pieces.empty(); pieces = passes.next()) {
    std::size_t end = 0;
    for (const PartPiece& piece : pieces) {
      const auto i = static_cast<std::size_t>(piece.item - items.data());
      EXPECT_EQ(piece.begin, done[i]);
      EXPECT_GT(piece.count, 0u);
      done[i] += piece.count;
      for (int rank = 0; rank < world; ++rank) {
        std::size_t at = end;
        for (int peer = 0; peer < world; ++peer) {
          if (peer == rank) continue;
          EXPECT_EQ(piece.place(peer, rank), at);
          EXPECT_EQ(at % 256, 0u);
          EXPECT_LE(at + piece.count * size, room);
          EXPECT_LE(piece.count * size, piece.stride);
          at += piece.stride;
        }
      }
      end += piece.stride * static_cast<std::size_t>(world - 1);
    }
  }
  EXPECT_TRUE(done == counts);
}

struct Case {
  DType dtype, out_dtype;
  ReduceOp op;
  bool accumulate;
};

/// A list of two tensors, reduced by NCCL's sends and by the CPU: equal in every bit.
void check_bits(NcclRank& self, Communicator& host, const Case& c, std::size_t count) {
  const auto ranks = static_cast<std::size_t>(self.world);
  const std::size_t counts[] = {count, count / 3};
  const auto seed = static_cast<unsigned>(self.rank + 1);
  std::vector<std::byte> ins[2], outs[2], wanted[2];
  std::vector<ConstBuffer> from;
  std::vector<Buffer> to, to_host;
  for (std::size_t i = 0; i < 2; ++i) {
    const auto values = random_floats(ranks * counts[i], seed + 10 * static_cast<unsigned>(i));
    ins[i] = encode(c.dtype, std::vector<double>(values.begin(), values.end()));
    const auto before = random_floats(counts[i], 99);
    outs[i] = wanted[i] = encode(c.out_dtype, std::vector<double>(before.begin(), before.end()));
    from.push_back({ins[i].data(), ranks * counts[i]});
    to.push_back({outs[i].data(), counts[i]});
    to_host.push_back({wanted[i].data(), counts[i]});
  }
  host.reduce_scatter(from, to_host, c.dtype, c.op, c.out_dtype, c.accumulate, kBlocking);
  self.comm->reduce_scatter(from, to, c.dtype, c.op, c.out_dtype, c.accumulate).wait();
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(outs[i] == wanted[i]);
}

}  // namespace

TEST(nccl_sums, pieces_cover_all_parts_once) {
  for (const int world : {1, 2, 3, 5, 32})
    for (const std::size_t size : {1, 2, 8})
      for (const std::size_t most : {0, 1000, 4096, 1 << 20}) {
        check_pieces({}, world, size, most);
        check_pieces({0, 0}, world, size, most);
        check_pieces({1}, world, size, most);
        check_pieces({5, 0, 127, 128, 129, 3}, world, size, most);
        check_pieces({1000, 1, 70'003}, world, size, most);
      }
}

TEST(nccl_sums, they_have_the_bits_of_the_cpu) {
  for (const int world : {1, 2, 3, 5}) {
    FakeNccl fake;
    run_nccl_world(world, {.max_delay_s = 50e-6}, [](NcclRank& self) {
      const auto host = Communicator::create(self.mesh, small_slots());
      for (const std::size_t count : {0, 1, 1000, 5003})  // 1000 elements of 5 ranks need more than one pass
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::max})
          for (const bool accumulate : {false, true}) {
            check_bits(self, *host, {DType::float32, DType::float32, op, accumulate}, count);
            check_bits(self, *host, {DType::bfloat16, DType::float32, op, accumulate}, count);
            check_bits(self, *host, {DType::bfloat16, DType::bfloat16, op, accumulate}, count);
            check_bits(self, *host, {DType::float16, DType::float32, op, accumulate}, count);
          }
      host->close();
    });
  }
}

TEST(nccl_sums, a_pass_is_one_group) {
  FakeNccl fake;
  run_nccl_world(3, {.received_nbytes = 2 * 4096}, [&](NcclRank& self) {
    const std::size_t nbytes = self.comm->memory().slot_nbytes;
    std::vector<float> in(3 * 2500, 1), out(2500);
    const ConstBuffer from{in.data(), in.size()};
    const Buffer to{out.data(), out.size()};
    self.comm->reduce_scatter({&from, 1}, {&to, 1}, DType::float32, ReduceOp::sum, DType::float32, false).wait();
    EXPECT_EQ(fake.call_counts(self.rank).groups, 3);  // of 1024 elements each
    EXPECT_EQ(self.comm->memory().slot_nbytes, nbytes + 2 * 4096);
    EXPECT_EQ(std::accumulate(out.begin(), out.end(), 0.0f), 7500.0f);
  });
}

TEST(nccl_sums, more_ranks_than_a_kernel_takes) {
  constexpr int kRanks = static_cast<int>(device::kMaxKernelBuffers) + 1;
  FakeNccl fake;
  run_nccl_world(kRanks, {}, [&](NcclRank& self) {
    std::vector<float> in(kRanks), out(1, 10);
    std::iota(in.begin(), in.end(), 0.0f);
    const ConstBuffer from{in.data(), in.size()};
    const Buffer to{out.data(), out.size()};
    const auto scatter = [&](bool accumulate) {
      self.comm->reduce_scatter({&from, 1}, {&to, 1}, DType::float32, ReduceOp::sum, DType::float32, accumulate).wait();
    };
    scatter(false);
    EXPECT_EQ(out[0], static_cast<float>(kRanks * self.rank));
    EXPECT_EQ(self.comm->memory().slot_nbytes, self.control->memory().slot_nbytes);  // nothing received here
    expect_contains(message_of<Unsupported>([&] { scatter(true); }, "accumulate"),
                    {"reduce_scatter", "among 33 ranks", "at most 32"});
  });
}
