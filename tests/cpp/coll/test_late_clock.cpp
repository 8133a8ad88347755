// The times at which a wait reports late ranks, is extended for ranks that show life, and ends.
#include "coll/late_clock.hpp"
#include "test.hpp"

using namespace zcomm::coll;

namespace {

constexpr auto s = [](double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
};

}  // namespace

TEST(LateClock, an_exact_time_is_not_extended) {
  const auto t0 = Clock::now();
  LateClock clock({.timeout_s = 10, .limit_s = 0, .warn_s = 60});
  clock.start(t0);
  EXPECT_TRUE(clock.is_exact());
  EXPECT_TRUE(clock.next() == t0 + s(10));
  EXPECT_FALSE(clock.is_over(t0 + s(9.9)));
  EXPECT_TRUE(clock.is_over(t0 + s(10)));
  EXPECT_FALSE(clock.extend(t0 + s(10.1)));
  EXPECT_EQ(clock.waited_s(t0 + s(10.1)), 10.0);
}

TEST(LateClock, signs_of_life_extend_it_up_to_the_limit) {
  const auto t0 = Clock::now();
  LateClock clock({.timeout_s = 10, .limit_s = 25, .warn_s = 6});
  clock.start(t0);
  EXPECT_TRUE(clock.next() == t0 + s(6));
  EXPECT_TRUE(clock.is_warning_due(t0 + s(6)));
  clock.set_warned();
  EXPECT_FALSE(clock.is_warning_due(t0 + s(7)));
  EXPECT_TRUE(clock.next() == t0 + s(10));
  EXPECT_TRUE(clock.extend(t0 + s(10)));
  EXPECT_TRUE(clock.deadline() == t0 + s(20));
  EXPECT_TRUE(clock.extend(t0 + s(20)));
  EXPECT_TRUE(clock.deadline() == t0 + s(25));
  EXPECT_FALSE(clock.extend(t0 + s(25)));
  EXPECT_EQ(clock.waited_s(t0 + s(25)), 25.0);
  clock.start(t0 + s(30));
  EXPECT_TRUE(clock.deadline() == t0 + s(40));
  EXPECT_FALSE(clock.has_warned());
}

TEST(LateClock, a_thread_without_cpu_warns_before_it_waits_on) {
  const auto t0 = Clock::now();
  LateClock clock({.timeout_s = 10, .limit_s = 25, .warn_s = 6});
  clock.start(t0);
  EXPECT_TRUE(clock.is_warning_due(t0 + s(12)));
  EXPECT_FALSE(clock.is_over(t0 + s(12)));
  clock.set_warned();
  EXPECT_TRUE(clock.is_over(t0 + s(12)));
}
