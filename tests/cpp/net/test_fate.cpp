// Fates and causes: a death counts more than a closed communicator, and each cause has its error.
#include "base/error.hpp"
#include "net/fate.hpp"
#include "test.hpp"

using namespace zcomm;
using net::Cause;
using net::Fate;

TEST(Fate, a_death_counts_more_than_a_closed_communicator) {
  EXPECT_TRUE(net::fate_of(Fate::alive, false) == Fate::alive);
  EXPECT_TRUE(net::fate_of(Fate::alive, true) == Fate::left);
  for (const bool has_closed : {false, true}) {
    EXPECT_TRUE(net::fate_of(Fate::died, has_closed) == Fate::died);
    EXPECT_TRUE(net::fate_of(Fate::left, has_closed) == Fate::left);
  }
}

TEST(Fate, a_rank_that_is_missed_died_or_left) {
  EXPECT_TRUE(net::cause_of(Fate::died) == Cause::died);
  EXPECT_TRUE(net::cause_of(Fate::left) == Cause::left);
  EXPECT_TRUE(net::cause_of(Fate::alive) == Cause::left);
}

TEST(Fate, each_cause_has_its_error) {
  const auto end = [](Cause cause) { net::throw_cause(cause, 3, "rank 3 came late", "barrier (operation 7)"); };
  EXPECT_THROW_WITH(end(Cause::died), PeerLost, "rank 3 died; barrier (operation 7) cannot finish");
  EXPECT_THROW_WITH(end(Cause::left), PeerLost,
                    "rank 3 left (closed its communicator or said goodbye) while others needed it; barrier");
  EXPECT_THROW_WITH(end(Cause::late), Timeout, "rank 3 came late");
  EXPECT_THROW_WITH(end(Cause::mismatch), CollectiveMismatch, "rank 3 came late");
  EXPECT_THROW_WITH(end(Cause::failed), Error, "rank 3 failed: rank 3 came late");
  EXPECT_THROW_WITH(end(static_cast<Cause>(99)), Error, "rank 3 failed");  // of another version
  EXPECT_THROW_WITH(net::throw_cause(Cause::died, 3, "", ""), PeerLost, "rank 3 died");
  try {
    end(Cause::left);
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.rank, 3);
  }
}
