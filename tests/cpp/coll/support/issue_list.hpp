// IssueList: the calls of one rank on several communicators, as data: checked for circles of waits, and then run.
//
// [Note: order of chains] Levels are S < R < W. The operation of bucket i on one level waits only for an earlier
// bucket, or for the same bucket on a lower level. All ranks have the same list, so all waits follow one lexicographic
// order. find_circle() needs no such order: it knows that a queue runs in order, that an operation ends when all its
// ranks have begun it, and that a thread that waits issues nothing. Source: coll/executor.hpp.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace zcomm::test {

enum class Level { inside, across, world };

/// An operation of a bucket. A level may have several of one bucket, in order.
struct Op {
  int bucket = 0;
  Level level = Level::inside;
  int part = 0;
  auto operator<=>(const Op&) const = default;
};

struct Issue {
  enum class Kind { start, after, wait };  // an operation; an entry of level op.level; the issuing thread's wait
  Kind kind;
  Op op;       // started; after: its level's queue waits; wait: none
  Op awaited;  // of after and wait
};
using IssueList = std::vector<Issue>;

/// The gradients' chain: S.reduce_scatter into one of `slots` staging slots, R.reduce_scatter, R.all_gather; at last W.
/// A slot is free again when R has read it: S waits by an entry, or the thread waits.
inline IssueList chain_list(int buckets, int slots, bool by_entry) {
  using Kind = Issue::Kind;
  IssueList list;
  for (int i = 0; i < buckets; ++i) {
    const Op inside{i, Level::inside, 0}, across{i, Level::across, 0}, gather{i, Level::across, 1};
    if (i >= slots) list.push_back({by_entry ? Kind::after : Kind::wait, inside, {i - slots, Level::across, 0}});
    list.push_back({Kind::start, inside, {}});
    list.push_back({Kind::after, across, inside});
    list.push_back({Kind::start, across, {}});
    list.push_back({Kind::start, gather, {}});
  }
  list.push_back({Kind::after, {buckets - 1, Level::world, 0}, {buckets - 1, Level::across, 1}});
  list.push_back({Kind::start, {buckets - 1, Level::world, 0}, {}});
  list.push_back({Kind::wait, {}, {buckets - 1, Level::world, 0}});
  return list;
}

/// The same for state that all groups divide: R only scatters, and after W each piece's new weights are gathered across
/// groups behind its update. At last the barrier of the group, an operation of S, follows all gathers.
inline IssueList divided_state_list(int buckets, int slots) {
  using Kind = Issue::Kind;
  IssueList list;
  for (int i = 0; i < buckets; ++i) {
    if (i >= slots) list.push_back({Kind::wait, {}, {i - slots, Level::across, 0}});
    list.push_back({Kind::start, {i, Level::inside, 0}, {}});
    list.push_back({Kind::after, {i, Level::across, 0}, {i, Level::inside, 0}});
    list.push_back({Kind::start, {i, Level::across, 0}, {}});
  }
  const Op norm{buckets - 1, Level::world, 0}, barrier{2 * buckets, Level::inside, 0};
  for (int i = 0; i < buckets; ++i) list.push_back({Kind::wait, {}, {i, Level::across, 0}});
  list.push_back({Kind::start, norm, {}});
  list.push_back({Kind::wait, {}, norm});
  for (int i = 0; i < buckets; ++i) list.push_back({Kind::start, {buckets + i, Level::across, 0}, {}});
  list.push_back({Kind::after, barrier, {2 * buckets - 1, Level::across, 0}});
  list.push_back({Kind::start, barrier, {}});
  list.push_back({Kind::wait, {}, barrier});
  return list;
}

/// The first wait of the list that [Note: order of chains] forbids.
inline std::optional<Issue> first_out_of_order(const IssueList& list) {
  for (const Issue& issue : list) {
    const auto key = [](const Op& op) { return std::tuple(op.bucket, op.level); };
    if (issue.kind == Issue::Kind::after && !(key(issue.awaited) < key(issue.op))) return issue;
  }
  return std::nullopt;
}

/// lists: by rank. communicator(rank, level): a number for its communicator, the same on all ranks of it. Returns
/// whether the ranks would wait for one another for ever.
template <class CommunicatorOf>
bool has_circle(const std::vector<IssueList>& lists, const CommunicatorOf& communicator) {
  struct Node {
    std::vector<int> before;  // nodes that must have happened
    int state = 0;            // 1: being visited, 2: happens
  };
  std::vector<Node> nodes;
  const auto make = [&] {
    nodes.emplace_back();
    return static_cast<int>(nodes.size()) - 1;
  };
  const auto need = [&](int node, int before) {
    if (before >= 0) nodes[static_cast<std::size_t>(node)].before.push_back(before);
  };
  // Of the n-th operation of a communicator: the beginnings on its ranks, and the ends that wait for all of them.
  std::map<std::pair<int, int>, std::pair<std::vector<int>, std::vector<int>>> meetings;
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    int issued = -1;              // of this rank's thread
    std::map<Level, int> last;    // the end of each queue's last entry
    std::map<Level, int> counts;  // operations of each queue
    std::map<Op, int> ends;
    for (const Issue& issue : lists[rank]) {
      const int step = make();
      need(step, issued);
      issued = step;
      if (issue.kind == Issue::Kind::wait) {
        need(step, ends.at(issue.awaited));
        continue;
      }
      const Level level = issue.op.level;
      const int begin = make(), end = make();
      need(begin, step);
      if (last.contains(level)) need(begin, last[level]);
      need(end, begin);
      last[level] = end;
      if (issue.kind == Issue::Kind::after) {
        need(end, ends.at(issue.awaited));
      } else {
        ends[issue.op] = end;
        auto& [begins, all_ends] = meetings[{communicator(static_cast<int>(rank), level), counts[level]++}];
        begins.push_back(begin);
        all_ends.push_back(end);
      }
    }
  }
  for (const auto& [which, meeting] : meetings)
    for (const int end : meeting.second)
      for (const int begin : meeting.first) need(end, begin);

  const auto visit = [&](const auto& self, int index) -> bool {
    Node& node = nodes[static_cast<std::size_t>(index)];
    if (node.state != 0) return node.state == 1;
    node.state = 1;
    for (const int before : node.before)
      if (self(self, before)) return true;
    node.state = 2;
    return false;
  };
  for (int index = 0; index < static_cast<int>(nodes.size()); ++index)
    if (visit(visit, index)) return true;
  return false;
}

}  // namespace zcomm::test
