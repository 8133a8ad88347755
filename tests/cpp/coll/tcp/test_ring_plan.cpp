// The lists of the ring, run on symbols: worlds 2 to 9, odd counts, links that hold one segment or several, any order
// of progress among ranks.
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "coll/tcp/ring_plan.hpp"
#include "test.hpp"

namespace ring_plan_test {

using namespace zcomm;
using namespace zcomm::coll;
using Memory = Action::Memory;

namespace {

/// An element's contents: its identity, and the ranks that have been added, in order (a digit each, from 1).
struct Symbol {
  std::size_t chunk = 0, index = 0;
  std::uint64_t ranks = 0;
  bool operator==(const Symbol&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Symbol& s) {
  return out << "chunk " << s.chunk << "[" << s.index << "] of ranks " << std::hex << s.ranks << std::dec;
}
constexpr std::uint64_t digit(int rank) { return static_cast<std::uint64_t>(rank) + 1; }

/// The ranks of a finished element of `chunk`: from the one after its owner, round the ring, to the owner.
std::uint64_t ring_order(int world, int way, int chunk) {
  std::uint64_t ranks = 0;
  for (int i = 1; i <= world; ++i) ranks = ranks << 4 | digit((chunk + (way == 0 ? i : world - i)) % world);
  return ranks;
}

struct Case {
  int world, way, lane, lanes;
  bool reduces, gathers, raw_first;
  std::size_t segment_count, link_segments;
};

constexpr std::size_t kSlotNbytes = 1000;  // any: it distinguishes slots

/// One lane of all ranks.
class Lane {
 public:
  Lane(const Case& of, const TcpChunks& chunks)
      : case_(of), chunks_(chunks), ranks_(static_cast<std::size_t>(of.world)) {
    for (int r = 0; r < of.world; ++r) {
      Rank& rank = at(r);
      rank.plan = RingPlan({.rank = r,
                            .world_size = of.world,
                            .way = of.way,
                            .lane = of.lane,
                            .lanes = of.lanes,
                            .reduces = of.reduces,
                            .gathers = of.gathers,
                            .raw_first = of.raw_first,
                            .segment_count = of.segment_count,
                            .slot_nbytes = kSlotNbytes},
                           chunks);
      rank.slots.resize(RingPlan::kSlots);
      if (!of.reduces)  // the own chunk is in place
        for (std::size_t i = 0; i < chunks.count(r); ++i)
          rank.out[{static_cast<std::size_t>(r), i}] = {static_cast<std::size_t>(r), i, digit(r)};
    }
  }

  void run(std::mt19937& random) {
    int idle = 0;
    for (; !ended() && idle < 5000; ++idle) {
      const int r = static_cast<int>(random() % static_cast<unsigned>(case_.world));
      if (random() % 2 == 0 ? advance_send(r) : advance_recv(r)) idle = 0;
    }
    EXPECT_TRUE(ended());  // else the ring is deadlocked
    for (const Rank& rank : ranks_) {
      EXPECT_TRUE(rank.link.empty());  // each send has its recv
      for (const Slot& slot : rank.slots) EXPECT_TRUE(!slot.taken);
    }
  }

  /// Adds to `seen` how often each element of a chunk is in place on a rank.
  void check(std::map<std::pair<int, std::pair<std::size_t, std::size_t>>, int>& seen) {
    for (int r = 0; r < case_.world; ++r) {
      for (const auto& [place, symbol] : at(r).out) {
        const int owner = static_cast<int>(place.first);
        const bool own = !case_.reduces && owner == r;
        if (!own) ++seen[{r, place}];
        const std::uint64_t ranks = case_.reduces ? ring_order(case_.world, case_.way, owner) : digit(owner);
        EXPECT_EQ(symbol, (Symbol{place.first, place.second, ranks}));
      }
    }
  }

 private:
  struct Slot {
    bool taken = false;
    std::vector<Symbol> symbols;
  };
  struct Rank {
    RingPlan plan;
    std::size_t sent = 0, received = 0;
    bool sending = false, receiving = false;
    std::vector<Slot> slots;
    std::vector<Symbol> raw;
    std::map<std::pair<std::size_t, std::size_t>, Symbol> out;  // by chunk and element
    std::deque<std::vector<Symbol>> link{};                     // in flight from this rank
  };
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  bool ended() const {
    bool all = true;
    for (const Rank& rank : ranks_) all &= rank.sent == rank.plan.size() && rank.received == rank.plan.size();
    return all;
  }
  Slot& slot(Rank& rank, const Action& action) {
    EXPECT_EQ(action.slot % kSlotNbytes, std::size_t{0});
    EXPECT_LT(action.slot / kSlotNbytes, rank.slots.size());
    return rank.slots[action.slot / kSlotNbytes % rank.slots.size()];
  }
  Symbol input(int rank, const Action& action, std::size_t i) const {
    EXPECT_LT(action.in + i, chunks_.count(static_cast<int>(action.buffer)));
    return {action.buffer, action.in + i, digit(rank)};
  }

  /// Begins a send, or ends one that has begun; false if neither can be.
  bool advance_send(int r) {
    Rank& rank = at(r);
    if (!rank.sending) return rank.sending = rank.plan.may_send(rank.sent, rank.received);
    const Action action = rank.plan.send(rank.sent);
    EXPECT_EQ(action.peer, (r + (case_.way == 0 ? 1 : case_.world - 1)) % case_.world);
    if (action.count > 0 && rank.link.size() == case_.link_segments) return false;
    std::vector<Symbol> symbols;
    for (std::size_t i = 0; i < action.count; ++i) {
      if (action.from == Memory::input) symbols.push_back(input(r, action, i));
      if (action.from == Memory::output) {
        const auto there = rank.out.find({action.buffer, action.out + i});
        EXPECT_TRUE(there != rank.out.end());  // sent on only once it was received
        symbols.push_back(there == rank.out.end() ? Symbol{} : there->second);
      }
    }
    if (action.from == Memory::slot) {
      Slot& from = slot(rank, action);
      EXPECT_TRUE(from.taken);
      symbols = std::exchange(from.symbols, {});
      from.taken = false;
    }
    EXPECT_EQ(symbols.size(), action.count);
    if (action.count > 0) rank.link.push_back(std::move(symbols));  // an empty segment is not a byte on a socket
    rank.sending = false;
    ++rank.sent;
    return true;
  }

  bool advance_recv(int r) {
    Rank& rank = at(r);
    if (!rank.receiving) {
      if (!rank.plan.may_receive(rank.sent, rank.received)) return false;
      // From here on bytes may arrive.
      const Action action = rank.plan.recv(rank.received);
      if (action.to == Memory::slot) EXPECT_TRUE(!slot(rank, action).taken);
      return rank.receiving = true;
    }
    const Action action = rank.plan.recv(rank.received);
    EXPECT_EQ(action.peer, (r + (case_.way == 0 ? case_.world - 1 : 1)) % case_.world);
    Rank& before = at(action.peer);
    std::vector<Symbol> symbols;
    if (action.count > 0) {
      if (before.link.empty()) return false;
      symbols = std::move(before.link.front());
      before.link.pop_front();
    }
    EXPECT_EQ(symbols.size(), action.count);
    if (action.to == Memory::slot) {
      EXPECT_TRUE(!slot(rank, action).taken);
      slot(rank, action) = {true, std::move(symbols)};
    } else if (action.to == Memory::raw) {
      rank.raw = std::move(symbols);
    } else {
      for (std::size_t i = 0; i < symbols.size(); ++i) put(rank, action, i, symbols[i]);
    }
    EXPECT_EQ(rank.plan.is_reduced(rank.received), action.to != Memory::output);
    if (rank.plan.is_reduced(rank.received)) reduce(r, rank.plan.reduce(rank.received), action);
    rank.receiving = false;
    ++rank.received;
    return true;
  }

  void reduce(int r, const Action& action, const Action& recv) {
    Rank& rank = at(r);
    EXPECT_TRUE(action.from == recv.to && action.buffer == recv.buffer && action.in == recv.in);
    EXPECT_EQ(action.count, recv.count);
    Slot& sums = slot(rank, action);
    std::vector<Symbol> came = std::exchange(action.from == Memory::raw ? rank.raw : sums.symbols, {});
    EXPECT_EQ(sums.taken, action.from == Memory::slot);
    for (std::size_t i = 0; i < came.size(); ++i) {
      const Symbol own = input(r, action, i);
      EXPECT_TRUE(came[i].chunk == own.chunk && came[i].index == own.index);
      came[i].ranks = came[i].ranks << 4 | own.ranks;
      if (action.to == Memory::output) put(rank, action, i, came[i]);
    }
    sums.taken = action.to == Memory::slot;
    if (sums.taken) sums.symbols = std::move(came);
  }

  void put(Rank& rank, const Action& action, std::size_t i, const Symbol& symbol) {
    EXPECT_TRUE(rank.out.emplace(std::pair{action.buffer, action.out + i}, symbol).second);  // once
  }

  const Case case_;
  const TcpChunks& chunks_;
  std::vector<Rank> ranks_;
};

std::vector<Item> items_of(std::initializer_list<std::size_t> counts) {
  std::vector<Item> items;
  for (const std::size_t count : counts) items.push_back({.count = count});
  return items;
}

}  // namespace

TEST(ring_plan, sums_once_in_ring_order_with_each_send_received) {
  std::mt19937 random(5);
  const auto lists = {items_of({}), items_of({1}), items_of({63, 0, 2}), items_of({700}), items_of({64, 65, 1500})};
  for (int world = 2; world <= 9; ++world) {
    for (const auto& items : lists) {
      for (const auto shape : {TcpChunks::Shape::whole, TcpChunks::Shape::parts}) {
        for (const auto& [reduces, gathers] : {std::pair{true, true}, std::pair{true, false}, std::pair{false, true}}) {
          TcpChunks chunks;
          chunks.set(items, shape, world);
          if (test::kSanitized && random() % 4 != 0) continue;
          const int lanes = (world == 2 ? 1 : 2) * static_cast<int>(1 + random() % 2);
          const bool raw_first = random() % 2 == 0;
          const std::size_t segment = random() % 2 == 0 ? 8 : 64, link = random() % 2 == 0 ? 1 : 5;
          std::map<std::pair<int, std::pair<std::size_t, std::size_t>>, int> seen;
          for (int lane = 0; lane < lanes; ++lane) {
            const int way = lane * (world == 2 ? 1 : 2) / lanes;
            Lane one({world, way, lane, lanes, reduces, gathers, raw_first, segment, link}, chunks);
            one.run(random);
            one.check(seen);
          }
          std::size_t expected = 0;  // all lanes together: everything, once
          for (int r = 0; r < world; ++r)
            for (int c = 0; c < world; ++c) expected += (gathers ? reduces || c != r : c == r) ? chunks.count(c) : 0;
          EXPECT_EQ(seen.size(), expected);
          for (const auto& [place, times] : seen) EXPECT_EQ(times, 1);
        }
      }
    }
  }
}

}  // namespace ring_plan_test
