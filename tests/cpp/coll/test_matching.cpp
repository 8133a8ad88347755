// Which receive a message belongs to, without a channel: order, tags, any rank, messages that are still arriving.
#include <map>
#include <random>
#include <utility>

#include "coll/matching.hpp"
#include "test.hpp"

using namespace zcomm;
using namespace zcomm::coll;

namespace {

constexpr int kAny = -1;
using Messages = Matching<int, int>;  // both are numbers: of a receive, of a message

/// A whole message comes; the receive that gets it, or 0.
int come(Messages& messages, int peer, int tag, int number) {
  if (const auto receive = messages.match(peer, tag)) return *receive;
  messages.keep(peer, tag, number, true);
  return 0;
}

/// A receive is called; the message that it gets, or 0.
int call(Messages& messages, int receive, int peer, int tag) {
  auto* const early = messages.find_early(peer, tag);
  if (early == nullptr) {
    messages.post(receive, peer, tag);
    return 0;
  }
  const int number = early->head;
  messages.drop(*early);
  return number;
}

}  // namespace

TEST(matching, first_receive_gets_first_message_of_its_rank_and_tag) {
  Messages messages(3);
  EXPECT_EQ(call(messages, 1, 2, 7), 0);
  EXPECT_EQ(call(messages, 2, 2, 7), 0);
  EXPECT_EQ(call(messages, 3, 2, 8), 0);
  EXPECT_EQ(come(messages, 1, 7, 10), 0);  // of another rank
  EXPECT_EQ(come(messages, 2, 8, 11), 3);
  EXPECT_EQ(come(messages, 2, 7, 12), 1);
  EXPECT_EQ(come(messages, 2, 7, 13), 2);
  EXPECT_EQ(come(messages, 2, 7, 14), 0);
  EXPECT_EQ(come(messages, 2, 7, 15), 0);
  EXPECT_EQ(call(messages, 4, 2, 7), 14);
  EXPECT_EQ(call(messages, 5, 1, 7), 10);
  EXPECT_EQ(call(messages, 6, 2, 7), 15);
  EXPECT_EQ(messages.early().size(), std::size_t{0});
}

TEST(matching, any_rank_takes_turns_with_named_ranks) {
  Messages messages(3);
  call(messages, 1, kAny, 0);
  call(messages, 2, 1, 0);
  call(messages, 3, kAny, 0);
  EXPECT_EQ(come(messages, 2, 5, 9), 0);  // the tag still counts
  EXPECT_EQ(come(messages, 1, 0, 10), 1);
  EXPECT_EQ(come(messages, 2, 0, 11), 3);
  EXPECT_EQ(come(messages, 1, 0, 12), 2);
  come(messages, 2, 0, 13), come(messages, 1, 0, 14);
  EXPECT_EQ(call(messages, 4, kAny, 0), 13);  // in order of arrival
  EXPECT_EQ(call(messages, 5, kAny, 0), 14);
}

TEST(matching, wants_the_ranks_of_posted_receives) {
  Messages messages(3);
  EXPECT_TRUE(!messages.wants(1));
  messages.post(1, 1, 0);
  EXPECT_TRUE(messages.wants(1) && !messages.wants(2));
  messages.post(2, kAny, 0);
  EXPECT_TRUE(messages.wants(1) && messages.wants(2));
  messages.remove(1);
  messages.remove(1);  // no longer posted: nothing happens
  EXPECT_TRUE(messages.wants(1) && messages.wants(0));
  EXPECT_EQ(messages.match(2, 0).value_or(0), 2);
  EXPECT_TRUE(!messages.wants(1) && !messages.wants(2));
}

TEST(matching, removes_the_first_that_waits_for_one_rank_alone) {
  Messages messages(3);
  messages.post(1, kAny, 0), messages.post(2, 1, 3), messages.post(3, 1, 4), messages.post(4, 2, 0);
  EXPECT_EQ(messages.remove_first(1).value_or(0), 2);
  EXPECT_EQ(messages.remove_first(1).value_or(0), 3);
  EXPECT_TRUE(!messages.remove_first(1));
  EXPECT_EQ(messages.remove_first(kAny).value_or(0), 1);
  int left = 0;
  messages.each_posted([&](int receive) { left = receive; });
  EXPECT_EQ(left, 4);
}

TEST(matching, a_message_that_still_arrives_is_given_when_it_is_complete) {
  Messages messages(2);
  auto& arriving = messages.keep(1, 0, 10, false, 100);
  EXPECT_EQ(messages.early_nbytes(1), std::size_t{100});
  EXPECT_EQ(messages.early_nbytes(0), std::size_t{0});
  EXPECT_EQ(call(messages, 1, 1, 0), 0);  // must not get half a message
  EXPECT_EQ(call(messages, 2, 1, 0), 0);
  const auto is_ten = [](int number) { return number == 10; };
  auto* const kept = messages.find_kept(1, is_ten);
  EXPECT_TRUE(kept == &arriving);
  EXPECT_TRUE(messages.find_kept(0, is_ten) == nullptr);
  EXPECT_EQ(messages.complete(*kept).value_or(0), 1);
  messages.drop(*kept);
  EXPECT_EQ(messages.early_nbytes(1), std::size_t{0});
  messages.keep(1, 8, 10, true, 5);
  messages.keep(0, 8, 10, true, 7);
  auto& last = messages.keep(1, 8, 10, true, 6);
  EXPECT_TRUE(messages.find_kept(1, is_ten) == &last);
  EXPECT_EQ(messages.early_nbytes(1), std::size_t{11});

  auto& unasked = messages.keep(1, 9, 11, false);
  EXPECT_TRUE(!messages.complete(unasked));
  EXPECT_EQ(call(messages, 3, 1, 9), 11);
}

TEST(matching, dropped_messages_lend_their_memory) {
  Matching<int, int> messages(2, 64);
  auto& first = messages.keep(1, 0, 1, true);
  EXPECT_TRUE(first.payload.empty() && first.payload.capacity() >= 64);
  first.payload.resize(64);
  const std::byte* const memory = first.payload.data();
  messages.drop(first);
  auto& second = messages.keep(0, 3, 2, true);
  EXPECT_TRUE(second.payload.empty());
  second.payload.resize(64);
  EXPECT_TRUE(second.payload.data() == memory);
}

// Any order of calls and arrivals: each message goes to one receive, and messages of one rank and tag go in order to
// receives in order.
TEST(matching, keeps_order_whatever_comes_first) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    constexpr int kRanks = 3, kTags = 2;
    Messages messages(kRanks);
    struct Asked {
      int peer, tag;
    };
    std::map<int, Asked> receives;
    std::map<int, int> given;                            // receive to message
    std::map<int, std::pair<int, int>> origin;           // message to rank and tag
    std::map<std::pair<int, int>, int> last_of_pair;     // rank and tag to the message given last
    std::map<std::pair<int, int>, int> last_of_receive;  // as asked, to the receive served last
    int next = 1;
    for (int i = 0; i < 60; ++i) {
      const int peer = static_cast<int>(random() % kRanks), tag = static_cast<int>(random() % kTags), id = next++;
      int receive = 0, message = 0;
      if (random() % 2 == 0) {
        const int from = random() % 3 == 0 ? kAny : peer;
        receives[id] = {from, tag};
        receive = id, message = call(messages, id, from, tag);
      } else {
        origin[id] = {peer, tag};
        message = id, receive = come(messages, peer, tag, id);
      }
      if (receive == 0 || message == 0) continue;
      EXPECT_TRUE(given.emplace(receive, message).second);
      const Asked asked = receives[receive];
      EXPECT_EQ(asked.tag, origin[message].second);
      EXPECT_TRUE(asked.peer == kAny || asked.peer == origin[message].first);
      EXPECT_LT(std::exchange(last_of_pair[origin[message]], message), message);
      EXPECT_LT(std::exchange(last_of_receive[{asked.peer, asked.tag}], receive), receive);
    }
    // The remaining messages and receives do not match.
    messages.each_posted([&](int receive) {
      EXPECT_TRUE(messages.find_early(receives[receive].peer, receives[receive].tag) == nullptr);
    });
    EXPECT_EQ(given.size() + messages.early().size(), origin.size());
  }
}
