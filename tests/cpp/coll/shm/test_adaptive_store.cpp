// AdaptiveStore: all bytes arrive, and it writes past the cache while that is faster, and only then.
#include <algorithm>
#include <vector>

#include "coll/shm/adaptive_store.hpp"
#include "test.hpp"

using namespace zcomm;
using coll::AdaptiveStore;

namespace {

constexpr std::size_t kNbytes = 1 << 20;

bool streams(const AdaptiveStore& writer) { return writer.stores() == device::Stores::streaming; }

void learn(AdaptiveStore& writer, double gb_per_s, int times = 1) {
  for (int i = 0; i < times; ++i) writer.learn(kNbytes, kNbytes / (gb_per_s * 1e9));
}

}  // namespace

TEST(adaptive_store, copies_either_way) {
  for (const bool past_cache : {false, true}) {
    for (const std::size_t nbytes : {0, 1, 4097, 16 << 10, (64 << 10) + 13}) {
      AdaptiveStore writer;
      if (past_cache) learn(writer, 1.0, 3);
      EXPECT_EQ(streams(writer), past_cache);
      std::vector<char> from(nbytes + 1), to(nbytes + 2, 'x');
      for (std::size_t i = 0; i < nbytes; ++i) from[i] = static_cast<char>(i * 7);
      writer.write(to.data() + 1, from.data(), nbytes);
      EXPECT_TRUE(std::equal(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(nbytes), to.begin() + 1));
      EXPECT_EQ(to[0], 'x');
      EXPECT_EQ(to[nbytes + 1], 'x');
    }
  }
}

TEST(adaptive_store, one_slow_write_decides_nothing) {
  AdaptiveStore writer;
  for (int i = 0; i < 100; ++i) {
    learn(writer, 0.5, 2);
    learn(writer, 30.0);
    EXPECT_FALSE(streams(writer));
  }
}

TEST(adaptive_store, streams_while_caches_are_far) {
  AdaptiveStore writer;
  learn(writer, 2.0, 3);
  int streamed = 0;
  constexpr int kWrites = 10'000;
  for (int i = 0; i < kWrites; ++i) {
    streamed += streams(writer) ? 1 : 0;
    learn(writer, !streams(writer) ? 2.0 : i % 10 == 0 ? 1.0 : 12.0);  // some are interrupted
  }
  EXPECT_TRUE(streamed > kWrites * 99 / 100);  // and it tries the cache now and then:
  EXPECT_TRUE(streamed < kWrites);
}

TEST(adaptive_store, goes_back_when_caches_are_near_again) {
  AdaptiveStore writer;
  learn(writer, 2.0, 3);
  learn(writer, 12.0, 300);
  learn(writer, 30.0, 300);
  EXPECT_FALSE(streams(writer));
}

TEST(adaptive_store, stays_with_the_cache_where_all_is_slow) {
  AdaptiveStore writer;
  int streamed = 0;
  constexpr int kWrites = 10'000;
  for (int i = 0; i < kWrites; ++i) {
    streamed += streams(writer) ? 1 : 0;
    learn(writer, 2.0);
  }
  EXPECT_TRUE(streamed < kWrites / 50);
}
