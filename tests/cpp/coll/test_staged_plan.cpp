// The lists of the staged pipeline, run on symbols: worlds 1 to 9, awkward counts, any order in which ranks get on.
#include <array>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "coll/staged_plan.hpp"
#include "test.hpp"

namespace staged_plan_test {

using namespace zcomm;
using namespace zcomm::coll;
using Kind = Action::Kind;
using Memory = Action::Memory;

namespace {

constexpr std::size_t kElement = 8;  // bytes: a symbol per element

/// An element's contents: its identity, and the ranks that have been added, in order (a digit each, from 1).
struct Symbol {
  std::size_t item = 0, index = 0;
  std::uint64_t ranks = 0;
  bool operator==(const Symbol&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Symbol& s) {
  return out << s.item << "[" << s.index << "] of ranks " << std::hex << s.ranks << std::dec;
}
constexpr std::uint64_t digit(int rank) { return static_cast<std::uint64_t>(rank) + 1; }

struct Case {
  OpKind kind;
  int world, root;
  std::vector<std::size_t> counts;
  std::size_t slot_nbytes;
  std::uint32_t slot_count;
  Lags lags;
};

/// An element of a slot: its contents, the step that wrote it, and the number of reads by peers.
struct Cell {
  Symbol symbol;
  std::uint32_t step = 0;
  bool written = false;
  int reads = 0;
};

class World {
 public:
  explicit World(const Case& of) : case_(of), ranks_(static_cast<std::size_t>(of.world)) {
    for (int r = 0; r < of.world; ++r) {
      Rank& rank = at(r);
      rank.slots.resize(of.slot_count, std::vector<Cell>(of.slot_nbytes / kElement));
      for (const std::size_t count : of.counts) rank.items.push_back({.count = count});
      rank.out.resize(of.counts.size());
      rank.plan.start({.kind = of.kind,
                       .root = of.root,
                       .rank = r,
                       .world_size = of.world,
                       .element_nbytes = kElement,
                       .slot_nbytes = of.slot_nbytes,
                       .lags = of.lags},
                      rank.items);
    }
  }

  /// Rounds: each rank does all of a phase between two of them.
  void run_rounds(std::mt19937& random) {
    for (bool more = true; more;) {
      more = false;
      std::vector<int> order;
      for (int r = 0; r < case_.world; ++r) order.push_back(r);
      std::shuffle(order.begin(), order.end(), random);
      round_ += 1;
      int going = 0;
      for (const int r : order) {
        if (!at(r).plan.next()) continue;
        ++going;
        const StagedPlan& plan = at(r).plan;
        for (const auto* stage : {&plan.copy_in(), &plan.reduce(), &plan.copy_out()})
          for (const Action& action : stage->actions) act(r, action, stage->step);
      }
      EXPECT_TRUE(going == 0 || going == case_.world);  // all ranks have as many rounds
      more = going > 0;
    }
    check();
  }

  /// Counters: a rank continues with its next stage as soon as the peers' counters allow, in any order of ranks.
  void run_counters(std::mt19937& random) {
    int ended = 0;
    for (int idle = 0; ended < case_.world && idle < 10000; ++idle) {
      const int r = static_cast<int>(random() % static_cast<unsigned>(case_.world));
      Rank& rank = at(r);
      if (rank.ended) continue;
      if (rank.stage == 3 || !rank.started) {
        rank.started = true, rank.stage = 0;
        if (!rank.plan.next()) {
          rank.ended = true, ++ended;
          continue;
        }
      }
      const std::array stages = {&rank.plan.copy_in(), &rank.plan.reduce(), &rank.plan.copy_out()};
      const auto& stage = *stages[static_cast<std::size_t>(rank.stage)];
      if (stage.runs) {
        if (!may_run(r, rank.stage, stage.step)) continue;
        for (const Action& action : stage.actions) act(r, action, stage.step);
        EXPECT_EQ(std::exchange(rank.done[static_cast<std::size_t>(rank.stage)], stage.step + 1), stage.step);
      }
      ++rank.stage;
      idle = 0;
    }
    EXPECT_EQ(ended, case_.world);  // else they wait for each other
    for (const Rank& rank : ranks_)
      for (const std::uint32_t done : rank.done) EXPECT_EQ(done, rank.plan.step_count());
    check();
  }

 private:
  struct Rank {
    StagedPlan plan;
    std::vector<Item> items;
    std::vector<std::vector<Cell>> slots;
    std::vector<std::map<std::size_t, Symbol>> out;  // by item; written places
    int stage = 0;
    bool started = false, ended = false;
    std::array<std::uint32_t, 3> done{};
  };
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  bool parts_in() const { return case_.kind == OpKind::reduce_scatter || case_.kind == OpKind::scatter; }
  bool parts_out() const { return case_.kind == OpKind::all_gather || case_.kind == OpKind::gather; }

  bool peers_have(int rank, int stage, std::uint32_t steps) {
    for (int q = 0; q < case_.world; ++q)
      if (q != rank && at(q).done[static_cast<std::size_t>(stage)] < steps) return false;
    return true;
  }
  /// The condition that the host's engine waits for.
  bool may_run(int r, int stage, std::uint32_t step) {
    const StagedPlan& plan = at(r).plan;
    if (stage == 0)
      return !plan.fills_slot() || step < case_.slot_count || peers_have(r, 2, step + 1 - case_.slot_count);
    if (stage == 1) return !reduces(case_.kind) || peers_have(r, 0, step + 1);
    if (!plan.reads_slots()) return true;
    if (case_.kind == OpKind::broadcast || case_.kind == OpKind::scatter) return at(case_.root).done[0] > step;
    return peers_have(r, reduces(case_.kind) ? 1 : 0, step + 1);
  }

  std::size_t input_count(std::size_t item) const {
    return case_.counts[item] * (parts_in() ? static_cast<std::size_t>(case_.world) : 1);
  }
  Symbol input(int rank, std::size_t item, std::size_t index) const {
    EXPECT_LT(index, input_count(item));
    return {item, index, digit(rank)};
  }
  Cell& cell(int rank, std::uint32_t step, std::size_t nbytes) {
    EXPECT_EQ(nbytes % kElement, std::size_t{0});
    auto& slot = at(rank).slots[step % case_.slot_count];
    EXPECT_LT(nbytes / kElement, slot.size());
    return slot[std::min(nbytes / kElement, slot.size() - 1)];
  }
  Symbol read(int reader, int owner, std::uint32_t step, std::size_t nbytes) {
    Cell& from = cell(owner, step, nbytes);
    EXPECT_TRUE(from.written && from.step == step);  // not an earlier step's, nor already the next one's
    from.reads += reader != owner ? 1 : 0;
    return from.symbol;
  }
  void write(int rank, std::uint32_t step, std::size_t nbytes, const Symbol& symbol) {
    Cell& to = cell(rank, step, nbytes);
    if (to.written && to.step != step) EXPECT_LT(0, to.reads);  // sent data has been received
    if (to.step == step) EXPECT_TRUE(!to.written);              // once per step
    to = {symbol, step, true, 0};
  }
  void put(int rank, std::size_t item, std::size_t index, const Symbol& symbol) {
    EXPECT_TRUE(at(rank).out[item].emplace(index, symbol).second);  // once
  }

  void act(int r, const Action& action, std::uint32_t step) {
    EXPECT_LT(std::size_t{0}, action.count);
    for (std::size_t i = 0; i < action.count; ++i) {
      const std::size_t slot = action.slot + i * kElement, in = action.in + i, out = action.out + i;
      switch (action.kind) {
        case Kind::copy:
          EXPECT_TRUE(action.from == Memory::input && action.to == Memory::output);
          put(r, action.buffer, out, input(r, action.buffer, in));
          break;
        case Kind::send:
          EXPECT_TRUE(action.from == Memory::input && action.to == Memory::slot && action.peer != r);
          write(r, step, slot, input(r, action.buffer, in));
          break;
        case Kind::recv:
          EXPECT_TRUE(action.from == Memory::slot && action.to == Memory::output && action.peer != r);
          put(r, action.buffer, out, read(r, action.peer, step, slot));
          break;
        case Kind::reduce:
          reduce(r, action, step, i);
      }
    }
  }

  void reduce(int r, const Action& action, std::uint32_t step, std::size_t i) {
    Symbol sum = input(r, action.buffer, action.in + i);
    sum.ranks = 0;
    for (int q = 0; q < case_.world; ++q) {
      const Symbol part =
          q == r ? input(r, action.buffer, action.in + i) : read(r, q, step, action.slot + i * kElement);
      EXPECT_EQ(part, (Symbol{sum.item, sum.index, digit(q)}));  // no sum of sums: reduced once
      sum.ranks = sum.ranks << 4 | part.ranks;
    }
    for (const Memory to : {action.to, action.also_to}) {
      if (to == Memory::output) put(r, action.buffer, action.out + i, sum);
      if (to == Memory::slot) {
        Cell& cell_of = cell(r, step, action.slot + i * kElement);
        EXPECT_TRUE(!cell_of.written || cell_of.step != step);  // the own chunk did not pass through it
        write(r, step, action.slot + i * kElement, sum);
      }
    }
  }

  void check() {
    std::uint64_t all = 0;
    for (int q = 0; q < case_.world; ++q) all = all << 4 | digit(q);
    for (int r = 0; r < case_.world; ++r) {
      EXPECT_EQ(at(r).plan.step_count(), at(0).plan.step_count());
      for (std::size_t item = 0; item < case_.counts.size(); ++item) check_output(r, item, all);
      for (const auto& slot : at(r).slots)
        for (const Cell& cell_of : slot) EXPECT_TRUE(!cell_of.written || cell_of.reads > 0);  // each send has its recv
    }
  }
  void check_output(int r, std::size_t item, std::uint64_t all) {
    const auto& out = at(r).out[item];
    const std::size_t count = case_.counts[item], me = static_cast<std::size_t>(r);
    const bool root = r == case_.root;
    const auto expect = [&](std::size_t elements, const auto& symbol_of) {
      EXPECT_EQ(out.size(), elements);
      for (const auto& [index, symbol] : out) EXPECT_EQ(symbol, symbol_of(index));
    };
    switch (case_.kind) {
      case OpKind::reduce:
        if (!root) return expect(0, [](std::size_t) { return Symbol{}; });
        [[fallthrough]];
      case OpKind::all_reduce:
        return expect(count, [&](std::size_t i) { return Symbol{item, i, all}; });
      case OpKind::reduce_scatter:
        return expect(count, [&](std::size_t i) { return Symbol{item, me * count + i, all}; });
      case OpKind::scatter:
        return expect(count, [&](std::size_t i) { return Symbol{item, me * count + i, digit(case_.root)}; });
      case OpKind::broadcast:
        return expect(root ? 0 : count, [&](std::size_t i) { return Symbol{item, i, digit(case_.root)}; });
      case OpKind::gather:
        if (!root) return expect(0, [](std::size_t) { return Symbol{}; });
        [[fallthrough]];
      default:  // all_gather
        expect(count * static_cast<std::size_t>(case_.world),
               [&](std::size_t i) { return Symbol{item, i % count, digit(static_cast<int>(i / count))}; });
    }
  }

  const Case case_;
  std::vector<Rank> ranks_;
  int round_ = 0;
};

const std::vector<std::vector<std::size_t>>& lists() {
  static const std::vector<std::vector<std::size_t>> all = [] {
    std::vector<std::vector<std::size_t>> lists = {
        {}, {0}, {1}, {63}, {64, 0, 65}, {3, 200}, {127, 1, 1, 129}, {0, 577, 0}, {1001}};
    lists.push_back(std::vector<std::size_t>(70, 2));  // more than a step has room for
    return lists;
  }();
  return all;
}

template <class Body>
void for_all(const Body& body) {
  std::mt19937 random(11);
  for (int world = 1; world <= 9; ++world) {
    for (const OpKind kind : {OpKind::all_reduce, OpKind::reduce, OpKind::reduce_scatter, OpKind::all_gather,
                              OpKind::broadcast, OpKind::gather, OpKind::scatter}) {
      const std::vector<int> roots = has_root(kind) ? std::vector<int>{0, world - 1} : std::vector<int>{-1};
      for (const int root : roots) {
        for (const auto& counts : lists()) {
          const std::size_t slot_nbytes = static_cast<std::size_t>(world) * 64 * (random() % 3 == 0 ? 1 : 8);
          body(Case{kind, world, root, counts, slot_nbytes, 0, {}}, random);
        }
      }
    }
  }
}

}  // namespace

TEST(staged_plan, rounds_reduce_once_in_rank_order_and_deliver_each_send) {
  for_all([](Case the, std::mt19937& random) {
    the.slot_count = 4, the.lags = Lags::of_rounds(the.kind);
    World(the).run_rounds(random);
  });
}

TEST(staged_plan, counters_reduce_once_in_rank_order_whatever_rank_is_first) {
  for_all([](Case the, std::mt19937& random) {
    for (const int slots : {1, 2, 4}) {
      if (test::kSanitized && slots > 2) continue;
      the.slot_count = static_cast<std::uint32_t>(slots), the.lags = Lags::of_slots(slots);
      World(the).run_counters(random);
    }
  });
}

TEST(staged_plan, needs_no_more_memory_when_it_is_warm) {
  std::vector<Item> items(40, Item{.count = 100});
  StagedPlan plan;
  const auto run = [&] {
    std::vector<std::size_t> capacities;
    plan.start({.kind = OpKind::all_reduce,
                .root = -1,
                .rank = 1,
                .world_size = 3,
                .element_nbytes = 4,
                .slot_nbytes = 4096,
                .lags = Lags::of_slots(4)},
               items);
    while (plan.next()) continue;
    for (const auto* stage : {&plan.copy_in(), &plan.reduce(), &plan.copy_out()})
      capacities.push_back(stage->actions.capacity());
    return capacities;
  };
  const auto warm = run();
  EXPECT_TRUE(run() == warm);
}

}  // namespace staged_plan_test
