// Chains of two communicators, as gradients of sharded and replicated weights have them: values by the tree of sums,
// and every rank's end when one rank dies, stops or leaves at any hop.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <latch>

#include "coll/support/chain_world.hpp"
#include "coll/support/error_checks.hpp"
#include "coll/support/issue_list.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr int kBuckets = 7, kSlots = 3;

/// ((v0 + v1) + v2) + ... of some ranks.
template <class ValuesOf>
std::vector<float> add_up(int first, int last, const ValuesOf& values_of_rank) {
  std::vector<float> sums = values_of_rank(first);
  for (int r = first + 1; r < last; ++r) {
    const std::vector<float> more = values_of_rank(r);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += more[i];
  }
  return sums;
}

/// One rank's memory and calls.
class Chain {
 public:
  explicit Chain(ChainRank& self) : self_(self), results_(kBuckets), shards_(kBuckets) {
    for (int i = 0; i < kBuckets; ++i) gradients_.push_back(gradient(i, self.rank));
    for (auto& slot : slots_) slot.resize(count_of(kBuckets) / static_cast<std::size_t>(self.size));
  }
  ~Chain() { works_.clear(); }

  /// W, the norm's communicator, is left out: it has a test of its own. Stops before step `stop`, if that is not null.
  void run(const IssueList& list, std::size_t stop = SIZE_MAX, const std::function<void()>& before_each = {}) {
    for (std::size_t step = 0; step < std::min(stop, list.size()); ++step) {
      const Issue& issue = list[step];
      if (issue.op.level == Level::world || issue.awaited.level == Level::world) continue;
      if (before_each) before_each();
      if (issue.kind == Issue::Kind::wait)
        work(issue.awaited).wait();
      else if (issue.kind == Issue::Kind::after)
        entries_.push_back(communicator(issue.op).after(work(issue.awaited)));
      else
        works_.emplace_back(issue.op, start(issue.op));
    }
  }

  /// Waits for all; returns the messages of errors.
  std::vector<std::string> wait() {
    std::vector<std::string> messages;
    const auto end = [&](Work& work) {
      try {
        work.wait();
      } catch (const Error& error) {
        messages.push_back(error.what());
      }
    };
    for (auto& [op, work] : works_) end(work);
    for (Work& entry : entries_) end(entry);
    return messages;
  }

  void check() const {
    for (int i = 0; i < kBuckets; ++i) {
      const auto tree = add_up(0, self_.groups, [&](int group) {
        return add_up(group * self_.size, (group + 1) * self_.size, [&](int rank) { return gradient(i, rank); });
      });
      const std::size_t part = count_of(i) / static_cast<std::size_t>(self_.size);
      const float* const own = tree.data() + static_cast<std::size_t>(self_.place()) * part;
      EXPECT_TRUE(results_[static_cast<std::size_t>(i)] == std::vector<float>(own, own + part));
    }
  }

 private:
  /// Divides by every world here; from one element per rank to several pieces of a link's segment.
  static std::size_t count_of(int bucket) { return 12u << (2 * bucket); }
  static std::vector<float> gradient(int bucket, int rank) {
    return random_floats(count_of(bucket), static_cast<unsigned>(100 * bucket + rank + 1));
  }
  Communicator& communicator(const Op& op) { return op.level == Level::inside ? *self_.inside : *self_.across; }
  Work& work(const Op& op) {
    for (auto& [known, work] : works_)
      if (known == op) return work;
    throw Error("no such operation");
  }

  Work start(const Op& op) {
    const auto i = static_cast<std::size_t>(op.bucket);
    const std::size_t part = count_of(op.bucket) / static_cast<std::size_t>(self_.size);
    std::vector<float>& slot = slots_[i % kSlots];
    Call call(op.level == Level::inside ? "inside" : "across");
    call.order = ReduceOrder::rank;
    if (op.level == Level::inside) {
      const ConstBuffer in{gradients_[i].data(), gradients_[i].size()};
      const Buffer out{slot.data(), part};
      return self_.inside->reduce_scatter({&in, 1}, {&out, 1}, DType::float32, ReduceOp::sum, DType::float32, false,
                                          call);
    }
    std::vector<float>& shard = shards_[i];
    if (op.part == 0) {
      shard.resize(part / static_cast<std::size_t>(self_.groups));
      const ConstBuffer in{slot.data(), part};
      const Buffer out{shard.data(), shard.size()};
      return self_.across->reduce_scatter({&in, 1}, {&out, 1}, DType::float32, ReduceOp::sum, DType::float32, false,
                                          call);
    }
    results_[i].resize(part);
    const ConstBuffer in{shard.data(), shard.size()};
    const Buffer out{results_[i].data(), part};
    return self_.across->all_gather({&in, 1}, {&out, 1}, DType::float32, call);
  }

  ChainRank& self_;
  std::vector<std::vector<float>> gradients_, results_, shards_;
  std::vector<float> slots_[kSlots];
  std::vector<std::pair<Op, Work>> works_;
  std::vector<Work> entries_;
};

/// Communicators by number: groups, then rows across them, then the world.
auto communicators(int groups, int size) {
  return [=](int rank, Level level) {
    if (level == Level::inside) return rank / size;
    return level == Level::across ? groups + rank % size : groups + size;
  };
}

std::size_t entries_of(const char* folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

/// Threads and descriptors of this process; those of an ended thread may take a moment to disappear.
void expect_nothing_left(std::size_t threads, std::size_t descriptors) {
  for (int turn = 0; turn < 200 && entries_of("/proc/self/task") != threads; ++turn)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
}

enum class Fault { dies, stops, leaves };
constexpr const char* kWords[] = {" died", " waited 0.5 s for rank ", " left"};  // of some rank's error

/// Rank `victim` fails before step `stop` of its list. Every other rank must end with an error that names a rank.
void run_fault(int groups, int size, Fault fault, int victim, std::size_t stop) {
  const std::size_t threads = entries_of("/proc/self/task"), descriptors = entries_of("/proc/self/fd");
  const IssueList list = chain_list(kBuckets, kSlots, true);
  std::latch survived(groups * size - 1);
  std::atomic<bool> cause_known{false};
  const auto start = std::chrono::steady_clock::now();
  run_chains(groups, size, fault == Fault::stops ? 0.5 : 30, [&](ChainRank& self) {
    Chain chain(self);
    if (self.rank == victim) {
      try {
        chain.run(list, stop);
      } catch (const Error&) {  // it would have failed before: not at the smallest sizes
        fail(__FILE__, __LINE__, "the victim has failed early");
      }
      if (fault == Fault::leaves) {
        self.inside->close();
        self.across->close();
      } else if (fault == Fault::dies) {
        self.inside_mesh->drop_dead();
        self.across_mesh->drop_dead();
      }
      survived.wait();  // a dead rank closes nothing, and a stopped one neither
      self.inside->close();
      self.across->close();
      chain.wait();
      return;
    }
    std::vector<std::string> messages;
    try {
      chain.run(list);
    } catch (const Error& error) {
      messages.push_back(error.what());
    }
    for (auto& message : chain.wait()) messages.push_back(std::move(message));
    self.inside->close();
    self.across->close();
    survived.count_down();
    bool named = false;
    for (const std::string& message : messages) {
      named |= message.find("rank ") != std::string::npos;
      if (message.find(kWords[static_cast<int>(fault)]) != std::string::npos) cause_known = true;
    }
    if (!named)
      fail(__FILE__, __LINE__,
           "rank " + std::to_string(self.rank) + " of " + std::to_string(groups) + " x " + std::to_string(size) +
               ": no error names a rank: " + (messages.empty() ? "no error" : messages[0]));
  });
  EXPECT_TRUE(cause_known.load());
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 20.0);
  expect_nothing_left(threads, descriptors);
}

}  // namespace

TEST(chains, issue_lists_have_no_circle) {
  for (const auto& [groups, size] : {std::pair{2, 2}, std::pair{2, 3}, std::pair{3, 2}}) {
    const auto of = communicators(groups, size);
    for (const bool by_entry : {false, true}) {
      for (const int slots : {1, 3, 20}) {
        const IssueList list = chain_list(kBuckets, slots, by_entry);
        EXPECT_TRUE(!first_out_of_order(list));
        EXPECT_FALSE(has_circle(std::vector<IssueList>(static_cast<std::size_t>(groups * size), list), of));
      }
    }
    for (const int slots : {1, 3, 20}) {
      const IssueList list = divided_state_list(kBuckets, slots);
      EXPECT_TRUE(!first_out_of_order(list));
      EXPECT_FALSE(has_circle(std::vector<IssueList>(static_cast<std::size_t>(groups * size), list), of));
    }
  }
}

TEST(chains, circles_are_found) {
  using Kind = Issue::Kind;
  const auto of = communicators(2, 2);
  const Op inside{0, Level::inside, 0}, across{0, Level::across, 0};
  const IssueList one{{Kind::start, inside, {}}, {Kind::after, across, inside}, {Kind::start, across, {}}};
  const IssueList other{{Kind::start, across, {}}, {Kind::after, inside, across}, {Kind::start, inside, {}}};
  EXPECT_TRUE(!first_out_of_order(one));
  EXPECT_TRUE(first_out_of_order(other).has_value());
  EXPECT_FALSE(has_circle({one, one, one, one}, of));
  EXPECT_FALSE(has_circle({other, other, other, other}, of));
  EXPECT_FALSE(has_circle({one, one, other, other}, of));  // the rows meet only in `across`
  EXPECT_FALSE(has_circle({one, other, one, one}, of));
  EXPECT_TRUE(has_circle({one, other, other, one}, of));
  const IssueList waits{{Kind::start, across, {}}, {Kind::wait, {}, across}, {Kind::start, inside, {}}};
  EXPECT_TRUE(has_circle({one, waits, waits, one}, of));
}

TEST(chains, results_are_the_tree_of_sums) {
  for (const auto& [groups, size] : {std::pair{2, 2}, std::pair{2, 3}}) {
    for (const bool by_entry : {false, true}) {
      run_chains(groups, size, 30, [&](ChainRank& self) {
        Chain chain(self);
        chain.run(chain_list(kBuckets, kSlots, by_entry));
        EXPECT_TRUE(chain.wait().empty());
        chain.check();
      });
    }
  }
}

TEST(chains, whatever_the_delays) {
  for (unsigned seed = 1; seed <= 6; ++seed) {
    run_chains(2, seed % 2 == 0 ? 2 : 3, 30, [&](ChainRank& self) {
      std::mt19937 random(seed * 100 + static_cast<unsigned>(self.rank));
      Chain chain(self);
      chain.run(chain_list(kBuckets, kSlots, seed % 3 != 0), SIZE_MAX, [&] {
        if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      });
      EXPECT_TRUE(chain.wait().empty());
      chain.check();
    });
  }
}

// Steps 4 to 8 are those of bucket 1: S, entry, R, R, and the next bucket's S.
TEST(chains, a_rank_that_dies_at_any_hop) {
  for (const std::size_t stop : {0u, 4u, 5u, 6u, 7u, 8u, 20u})
    for (const int victim : {0, 3}) run_fault(2, 2, Fault::dies, victim, stop);
  for (const std::size_t stop : {4u, 6u, 20u}) run_fault(2, 3, Fault::dies, 4, stop);
}

TEST(chains, a_rank_that_leaves_at_any_hop) {
  for (const std::size_t stop : {0u, 4u, 5u, 6u, 7u, 8u, 20u}) run_fault(2, 2, Fault::leaves, 1, stop);
  for (const std::size_t stop : {4u, 6u, 20u}) run_fault(2, 3, Fault::leaves, 4, stop);
}

TEST(chains, a_rank_that_stops_at_any_hop) {
  for (const std::size_t stop : {0u, 4u, 6u, 7u}) run_fault(2, 2, Fault::stops, 2, stop);
  for (const std::size_t stop : {4u, 6u}) run_fault(2, 3, Fault::stops, 1, stop);
}
