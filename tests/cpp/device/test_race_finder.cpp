// RaceFinder against an oracle that knows nothing of clocks: a graph of all operations, and which reaches which.
#include <algorithm>
#include <random>
#include <set>

#include "doubles/recorded/race_finder.hpp"
#include "test.hpp"

namespace zcomm::device {
namespace {

struct Access {
  std::size_t node;
  ByteRange range;
  bool is_write;
};

/// A random program of several actors, run on the finder and the oracle.
class Program {
 public:
  Program(unsigned seed, int actors, int steps) : random_(seed), last_(static_cast<std::size_t>(actors), kNone) {
    for (int a = 0; a < actors; ++a) finder_.add_actor();
    for (int i = 0; i < steps; ++i) step();
  }

  void compare() {
    std::set<std::pair<std::uint32_t, std::uint32_t>> true_pairs;
    for (std::uint32_t b = 0; b < accesses_.size(); ++b)
      for (std::uint32_t a = 0; a < b; ++a)
        if (races(a, b)) true_pairs.insert({a, b});
    for (const auto& [a, b, overlap] : reports_) {
      EXPECT_TRUE(true_pairs.contains({a, b}));
      for (const auto access : {a, b}) {
        EXPECT_LE(accesses_[access].range.begin, overlap.begin);
        EXPECT_GE(accesses_[access].range.end, overlap.end);
      }
    }
    for (std::uintptr_t byte = 0; byte < kBytes; ++byte) check_first(byte);
    races_ += true_pairs.size();
    clean_ += true_pairs.empty() ? 1 : 0;
  }

  static inline std::size_t races_ = 0, clean_ = 0;  // over all programs

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};
  static constexpr std::uintptr_t kBytes = 24;

  std::size_t pick(std::size_t below) { return random_() % below; }

  std::size_t add_node(std::size_t actor) {
    before_.emplace_back();
    const std::size_t node = before_.size() - 1;
    come_after(node, last_[actor]);
    last_[actor] = node;
    return node;
  }
  /// All that reaches `earlier`, and itself, reaches `node`.
  void come_after(std::size_t node, std::size_t earlier) {
    if (earlier == kNone) return;
    before_[node].insert(before_[earlier].begin(), before_[earlier].end());
    before_[node].insert(earlier);
  }

  void step() {
    const std::size_t actor = pick(last_.size()), own = actor;
    switch (pick(5)) {
      case 0:  // record
        points_.push_back({finder_.clock(static_cast<int>(own)), last_[actor]});
        return;
      case 1: {  // wait
        if (points_.empty()) return;
        const auto& [clock, node] = points_[pick(points_.size())];
        finder_.join(static_cast<int>(own), clock);
        come_after(add_node(actor), node);
        return;
      }
      default:
        break;
    }
    const std::size_t node = add_node(actor);
    finder_.tick(static_cast<int>(own));
    for (std::size_t i = 0, count = 1 + pick(2); i < count; ++i) {
      const std::uintptr_t begin = pick(kBytes), end = begin + pick(kBytes - begin + 1);
      const bool is_write = pick(3) == 0;
      accesses_.push_back({node, {begin, end}, is_write});
      const auto number = static_cast<std::uint32_t>(accesses_.size() - 1);
      if (is_write)
        finder_.write(static_cast<int>(own), {begin, end}, number);
      else
        finder_.read(static_cast<int>(own), {begin, end}, number);
    }
  }

  bool races(std::uint32_t a, std::uint32_t b) const {
    const Access &first = accesses_[a], &second = accesses_[b];
    if (!first.is_write && !second.is_write) return false;
    if (first.node == second.node || before_[second.node].contains(first.node)) return false;
    return std::max(first.range.begin, second.range.begin) < std::min(first.range.end, second.range.end);
  }

  /// The first access to `byte` that races there has been reported.
  void check_first(std::uintptr_t byte) const {
    const auto touches = [&](std::uint32_t i) {
      return accesses_[i].range.begin <= byte && byte < accesses_[i].range.end;
    };
    for (std::uint32_t b = 0; b < accesses_.size(); ++b)
      for (std::uint32_t a = 0; a < b; ++a) {
        if (!touches(a) || !touches(b) || !races(a, b)) continue;
        EXPECT_TRUE(std::any_of(reports_.begin(), reports_.end(), [&](const Report& report) {
          return report.later == b && report.overlap.begin <= byte && byte < report.overlap.end;
        }));
        return;
      }
  }

  struct Report {
    std::uint32_t earlier, later;
    ByteRange overlap;
  };
  struct Point {
    RaceFinder::Clock clock;
    std::size_t node;
  };
  std::mt19937 random_;
  std::vector<Report> reports_;
  RaceFinder finder_{
      [this](std::uint32_t a, std::uint32_t b, ByteRange overlap) { reports_.push_back({a, b, overlap}); }};
  std::vector<std::set<std::size_t>> before_;
  std::vector<std::size_t> last_;
  std::vector<Point> points_;
  std::vector<Access> accesses_;
};

TEST(race_finder, equals_the_oracle) {
  for (unsigned seed = 0; seed < 1500; ++seed) {
    const int actors = 1 + static_cast<int>(seed % 5);
    Program(seed, actors, 4 + static_cast<int>(seed / 5 % 30)).compare();
  }
  EXPECT_GT(Program::races_, 1000u);
  EXPECT_GT(Program::clean_, 100u);
}

TEST(race_finder, forgets_what_was_freed) {
  int races = 0;
  RaceFinder finder([&](std::uint32_t, std::uint32_t, ByteRange) { ++races; });
  finder.add_actor();
  finder.add_actor();
  finder.tick(0);
  finder.write(0, {0, 100}, 0);
  finder.forget({20, 80});
  finder.tick(1);
  finder.write(1, {20, 80}, 1);
  EXPECT_EQ(races, 0);
  finder.write(1, {19, 20}, 2);
  finder.read(1, {80, 81}, 3);
  EXPECT_EQ(races, 2);
}

/// A ring of slots between two streams, with occasional large sweeps: n^2 would take minutes.
TEST(race_finder, a_long_trace) {
  std::size_t races = 0;
  RaceFinder finder([&](std::uint32_t, std::uint32_t, ByteRange) { ++races; });
  constexpr std::uintptr_t kSlot = 1 << 20;
  constexpr std::uint32_t kSlots = 2000;
  for (int a = 0; a < 8; ++a) finder.add_actor();
  for (std::uint32_t i = 0; i < 300000; ++i) {
    const std::uintptr_t at = i % kSlots * kSlot;
    const int writer = static_cast<int>(i % 4), reader = 4 + writer;
    finder.join(writer, finder.clock(4 + static_cast<int>((i % kSlots) % 4)));
    finder.tick(writer);
    finder.write(writer, {at, at + kSlot}, i);
    finder.join(reader, finder.clock(writer));
    finder.tick(reader);
    finder.read(reader, {at + i % 7, at + kSlot - i % 11}, i);
  }
  EXPECT_EQ(races, 0u);
}

}  // namespace
}  // namespace zcomm::device
