// Notices of the core for the program's log.
#include "base/notices.hpp"
#include "test.hpp"

using namespace zcomm;

TEST(notices, are_taken_once_and_in_order) {
  take_notices();
  EXPECT_FALSE(has_notices());
  post_notice("one");
  post_notice("two");
  EXPECT_TRUE(has_notices());
  EXPECT_TRUE((take_notices() == std::vector<std::string>{"one", "two"}));
  EXPECT_FALSE(has_notices());
  EXPECT_TRUE(take_notices().empty());
}

TEST(notices, that_are_not_taken_do_not_grow_without_end) {
  for (std::size_t i = 0; i < kMostNotices + 5; ++i) post_notice(std::to_string(i));
  const auto kept = take_notices();
  EXPECT_EQ(kept.size(), kMostNotices);
  EXPECT_EQ(kept.back(), std::to_string(kMostNotices - 1));
}
