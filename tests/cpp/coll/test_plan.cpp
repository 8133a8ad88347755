// Plans, exhaustively: every world 1..9, awkward counts and alignments; rings are played on plain integers.
#include <algorithm>

#include "coll/plan.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::coll;

namespace {

constexpr int kMaxWorld = 9;

std::vector<std::size_t> awkward_counts() {
  std::vector<std::size_t> counts;
  for (std::size_t count = 0; count <= 33; ++count) counts.push_back(count);
  for (const std::size_t count : {63, 64, 65, 127, 129, 1000, 1001, 1024}) counts.push_back(count);
  return counts;
}

template <class Body>
void for_all(Body body) {
  for (int world_size = 1; world_size <= kMaxWorld; ++world_size) {
    for (const std::size_t count : awkward_counts()) {
      for (const std::size_t align : {std::size_t{1}, std::size_t{3}, std::size_t{16}, std::size_t{64}}) {
        body(count, world_size, align);
      }
    }
  }
}

using Buffers = std::vector<std::vector<long>>;  // by rank

Buffers unlike_inputs(std::size_t count, int world_size) {
  Buffers buffers(static_cast<std::size_t>(world_size), std::vector<long>(count));
  for (std::size_t r = 0; r < buffers.size(); ++r) {
    for (std::size_t i = 0; i < count; ++i) buffers[r][i] = static_cast<long>((r + 1) * 1'000'000 + i * (r + 7));
  }
  return buffers;
}

std::vector<long> sum_of(const Buffers& buffers) {
  std::vector<long> sum(buffers[0].size());
  for (const auto& buffer : buffers) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += buffer[i];
  }
  return sum;
}

/// Plays one plan per rank in lockstep; what is sent in a step is taken before anything of that step arrives.
void play(const std::vector<std::vector<RingStep>>& plans, Buffers& buffers) {
  const std::size_t ranks = plans.size();
  for (std::size_t s = 0; s < plans[0].size(); ++s) {
    const Buffers before = buffers;
    for (std::size_t r = 0; r < ranks; ++r) {
      const std::size_t prev = (r + ranks - 1) % ranks;
      const RingStep& step = plans[r][s];
      EXPECT_TRUE(plans[prev][s].send == step.recv);  // both ends of a link speak of the same elements
      for (std::size_t i = step.recv.begin; i < step.recv.end; ++i) {
        buffers[r][i] = step.reduce ? buffers[r][i] + before[prev][i] : before[prev][i];
      }
    }
  }
}

template <class Plan>
std::vector<std::vector<RingStep>> plans_of(Plan plan, std::size_t count, int world_size, std::size_t align) {
  std::vector<std::vector<RingStep>> plans;
  for (int rank = 0; rank < world_size; ++rank) plans.push_back(plan(count, world_size, rank, align));
  return plans;
}

std::size_t sent_count(const std::vector<RingStep>& steps) {
  std::size_t sent = 0;
  for (const RingStep& step : steps) sent += step.send.count();
  return sent;
}

}  // namespace

TEST(Plan, chunks_cover_in_order_and_are_even) {
  for_all([](std::size_t count, int world_size, std::size_t align) {
    std::size_t next = 0, smallest = count, largest = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      const Range chunk = chunk_of(count, world_size, rank, align);
      EXPECT_EQ(chunk.begin, next);
      EXPECT_LE(chunk.begin, chunk.end);
      next = chunk.end;
      if (chunk.end != count) EXPECT_EQ(chunk.end % align, std::size_t{0});
      const std::size_t blocks = (chunk.count() + align - 1) / align;
      smallest = std::min(smallest, blocks);
      largest = std::max(largest, blocks);
    }
    EXPECT_EQ(next, count);
    EXPECT_LE(largest, smallest + 1);
  });
}

TEST(Plan, segments_cover_in_order) {
  for (std::size_t begin = 0; begin < 4; ++begin) {
    for (std::size_t count = 0; count < 20; ++count) {
      for (std::size_t segment = 1; segment < 22; ++segment) {
        const auto segments = segments_of({begin, begin + count}, segment);
        std::size_t next = begin;
        for (const Range& piece : segments) {
          EXPECT_EQ(piece.begin, next);
          EXPECT_LT(std::size_t{0}, piece.count());
          EXPECT_LE(piece.count(), segment);
          next = piece.end;
        }
        EXPECT_EQ(next, begin + count);
        EXPECT_EQ(segments.size(), (count + segment - 1) / segment);
      }
    }
  }
}

TEST(Plan, ring_reduce_scatter_sums_each_ranks_chunk) {
  for_all([](std::size_t count, int world_size, std::size_t align) {
    Buffers buffers = unlike_inputs(count, world_size);
    const std::vector<long> sum = sum_of(buffers);
    play(plans_of(ring_reduce_scatter, count, world_size, align), buffers);
    for (int rank = 0; rank < world_size; ++rank) {
      const Range chunk = chunk_of(count, world_size, rank, align);
      const auto& mine = buffers[static_cast<std::size_t>(rank)];
      for (std::size_t i = chunk.begin; i < chunk.end; ++i) EXPECT_EQ(mine[i], sum[i]);
    }
  });
}

TEST(Plan, ring_all_gather_brings_every_chunk) {
  for_all([](std::size_t count, int world_size, std::size_t align) {
    Buffers buffers(static_cast<std::size_t>(world_size), std::vector<long>(count, -1));
    for (int rank = 0; rank < world_size; ++rank) {
      const Range chunk = chunk_of(count, world_size, rank, align);
      for (std::size_t i = chunk.begin; i < chunk.end; ++i)
        buffers[static_cast<std::size_t>(rank)][i] = static_cast<long>(i);
    }
    play(plans_of(ring_all_gather, count, world_size, align), buffers);
    for (const auto& buffer : buffers) {
      for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(buffer[i], static_cast<long>(i));
    }
  });
}

TEST(Plan, ring_all_reduce_gives_everyone_the_sum) {
  for_all([](std::size_t count, int world_size, std::size_t align) {
    Buffers buffers = unlike_inputs(count, world_size);
    const std::vector<long> sum = sum_of(buffers);
    play(plans_of(ring_all_reduce, count, world_size, align), buffers);
    for (const auto& buffer : buffers) EXPECT_TRUE(buffer == sum);
  });
}

TEST(Plan, rings_take_the_steps_and_bytes_of_the_formula) {
  for_all([](std::size_t count, int world_size, std::size_t align) {
    const auto ranks = static_cast<std::size_t>(world_size);
    std::size_t all_sent = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      const auto scatter = ring_reduce_scatter(count, world_size, rank, align);
      const auto gather = ring_all_gather(count, world_size, rank, align);
      EXPECT_EQ(scatter.size(), ranks - 1);
      EXPECT_EQ(gather.size(), ranks - 1);
      EXPECT_EQ(ring_all_reduce(count, world_size, rank, align).size(), 2 * (ranks - 1));
      // All chunks but one, (P-1)/P of the elements; one chunk is less than two aligns from the mean: chunks differ by
      // one, and the last may end short.
      EXPECT_EQ(sent_count(scatter), count - chunk_of(count, world_size, rank, align).count());
      for (const std::size_t sent : {sent_count(scatter), sent_count(gather)}) {
        EXPECT_LT(sent * ranks, count * (ranks - 1) + 2 * align * ranks);
        EXPECT_LT(count * (ranks - 1), sent * ranks + 2 * align * ranks);
        all_sent += sent;
      }
    }
    EXPECT_EQ(all_sent, 2 * count * (ranks - 1));  // exact on the whole
  });
}

TEST(Plan, names_impossible_arguments) {
  EXPECT_THROW_WITH(chunk_of(10, 0, 0, 1), InvalidArgument, "world_size 0");
  EXPECT_THROW_WITH(chunk_of(10, 3, 3, 1), InvalidArgument, "rank 3");
  EXPECT_THROW_WITH(chunk_of(10, 3, 0, 0), InvalidArgument, "align");
  EXPECT_THROW_WITH(segments_of({0, 10}, 0), InvalidArgument, "segment");
  EXPECT_THROW_WITH(ring_all_reduce(10, 3, -1, 1), InvalidArgument, "rank -1");
}
