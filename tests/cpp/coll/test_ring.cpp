// The ring runner over real sockets: worlds of threads, awkward counts, lost and silent neighbours.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "coll/ring.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::coll;

namespace {

constexpr double kPatience_s = 60.0;

/// next[r] and prev[r] are rank r's links.
struct RingLinks {
  explicit RingLinks(int world_size) : next(static_cast<std::size_t>(world_size)), prev(next.size()) {
    for (std::size_t r = 0; r < next.size(); ++r) {
      const std::size_t after = (r + 1) % next.size();
      std::tie(next[r], prev[after]) = net::make_link_pair(static_cast<int>(r), static_cast<int>(after));
    }
  }
  std::vector<std::unique_ptr<net::Link>> next, prev;
};

void run_ranks(int world_size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([rank, &body] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        test::fail("rank", rank, std::string("uncaught: ") + error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

/// Small integers, so that float sums are exact in any order.
template <class T>
T element(int rank, std::size_t i) {
  return static_cast<T>((i * 7 + static_cast<std::size_t>(rank) * 13) % 23) - static_cast<T>(rank);
}

template <class T>
T combine(ReduceOp op, T a, T b) {
  if (op == ReduceOp::min) return std::min(a, b);
  if (op == ReduceOp::max) return std::max(a, b);
  return a + b;
}

template <class T>
void check_all_reduce(DType dtype, ReduceOp op) {
  for (int world_size = 1; world_size <= 5; ++world_size) {
    RingLinks links(world_size);
    for (const std::size_t count : {0, 1, 2, 3, 4, 5, 7, 33, 1000, 1001, 100'003}) {
      std::vector<T> expected(count);
      for (std::size_t i = 0; i < count; ++i) {
        expected[i] = element<T>(0, i);
        for (int rank = 1; rank < world_size; ++rank) expected[i] = combine(op, expected[i], element<T>(rank, i));
      }
      run_ranks(world_size, [&](int rank) {
        const auto r = static_cast<std::size_t>(rank);
        std::vector<T> data(count);
        for (std::size_t i = 0; i < count; ++i) data[i] = element<T>(rank, i);
        std::vector<std::byte> scratch((count / static_cast<std::size_t>(world_size) + 16) * sizeof(T));
        const auto steps = ring_all_reduce(count, world_size, rank, 16);
        run_ring(steps, reinterpret_cast<std::byte*>(data.data()), dtype, op, scratch, *links.next[r], *links.prev[r],
                 kPatience_s);
        EXPECT_TRUE(data == expected);
      });
    }
  }
}

}  // namespace

TEST(Ring, all_reduce_of_integers) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
    check_all_reduce<std::int32_t>(DType::i32, op);
    check_all_reduce<std::int64_t>(DType::i64, op);
  }
}

TEST(Ring, all_reduce_of_floats) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
    check_all_reduce<float>(DType::f32, op);
    check_all_reduce<double>(DType::f64, op);
  }
}

TEST(Ring, average_is_left_to_the_caller) { check_all_reduce<float>(DType::f32, ReduceOp::avg); }

TEST(Ring, all_ranks_end_with_the_same_bits) {
  constexpr int world_size = 5;
  constexpr std::size_t count = 10'001;
  RingLinks links(world_size);
  std::vector<std::vector<float>> results(world_size, std::vector<float>(count));
  run_ranks(world_size, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    for (std::size_t i = 0; i < count; ++i) results[r][i] = 1.0f / static_cast<float>(i + r + 3);
    std::vector<std::byte> scratch(count * sizeof(float));
    run_ring(ring_all_reduce(count, world_size, rank, 16), reinterpret_cast<std::byte*>(results[r].data()), DType::f32,
             ReduceOp::sum, scratch, *links.next[r], *links.prev[r], kPatience_s);
  });
  for (const auto& result : results) EXPECT_TRUE(result == results[0]);
}

TEST(Ring, a_dropped_neighbour_is_lost) {
  RingLinks links(3);
  links.next[2].reset();
  links.prev[2].reset();
  std::vector<float> data(1000);
  std::vector<std::byte> scratch(4000);
  const auto run = [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    run_ring(ring_all_reduce(1000, 3, rank, 1), reinterpret_cast<std::byte*>(data.data()), DType::f32, ReduceOp::sum,
             scratch, *links.next[r], *links.prev[r], kPatience_s);
  };
  EXPECT_THROW_WITH(run(0), PeerLost, "rank 2");  // receives from it
  try {
    run(1);  // sends to it
    test::fail(__FILE__, __LINE__, "no PeerLost");
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.rank, 2);
  }
}

TEST(Ring, a_silent_neighbour_is_named) {
  RingLinks links(4);
  std::vector<float> data(1000);
  std::vector<std::byte> scratch(4000);
  EXPECT_THROW_WITH(run_ring(ring_all_reduce(1000, 4, 2, 1), reinterpret_cast<std::byte*>(data.data()), DType::f32,
                             ReduceOp::sum, scratch, *links.next[2], *links.prev[2], 0.05),
                    Timeout, "missing from rank 1");
}

TEST(Ring, too_little_scratch_is_refused_before_anything_moves) {
  RingLinks links(2);
  std::vector<float> data(1000);
  std::vector<std::byte> scratch(1999);
  EXPECT_THROW_WITH(run_ring(ring_all_reduce(1000, 2, 0, 1), reinterpret_cast<std::byte*>(data.data()), DType::f32,
                             ReduceOp::sum, scratch, *links.next[0], *links.prev[0], kPatience_s),
                    InvalidArgument, "1999");
  std::byte byte;
  EXPECT_EQ(links.prev[1]->try_recv(std::span(&byte, 1)), std::size_t{0});
}
