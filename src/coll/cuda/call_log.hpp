// CallLog: the last calls of a rank, and digests of all its calls so far, by number.
//
// Two ranks that have made the same calls have the same digest. Counts of all_to_all belong to pairs of ranks, so they
// have a balance of their own, which adds up to 0 over all ranks ([Note: balance] in coll/split_counts.hpp). Each call
// has another weight in it, so that a wrong count in one call and its opposite in another do not cancel out.
// Invariant: entries of the last kRoom calls. Thread rule: none of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "coll/operation.hpp"
#include "coll/split_counts.hpp"

namespace zcomm::coll {

/// Of all calls up to one.
struct CallDigest {
  std::uint64_t calls = 0, balance = 0;
};

class CallLog {
 public:
  static constexpr std::uint64_t kRoom = 1024;

  struct Entry {
    Signature signature;
    SplitCounts splits;  ///< of all_to_all
    CallDigest digest;
  };

  /// Numbers the operation, from 1.
  void add(Operation& operation);
  std::uint64_t count() const { return count_; }
  /// Of one of the last kRoom calls; number 0 is the state before the first.
  const Entry& operator[](std::uint64_t number) const { return entries_[number % kRoom]; }

 private:
  std::vector<Entry> entries_{kRoom};
  std::uint64_t count_ = 0;
};

/// Whether ranks with these digests have made the same calls, with counts that match.
template <class Digests>
bool same_calls(const Digests& by_rank) {
  std::uint64_t balance = 0;
  bool same = true;
  for (const CallDigest& digest : by_rank) {
    same &= digest.calls == by_rank[0].calls;
    balance += digest.balance;
  }
  return same && balance == 0;
}

}  // namespace zcomm::coll
