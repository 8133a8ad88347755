// Comparing the counts of all_to_all (coll/split_counts.hpp).
#include "coll/split_counts.hpp"

#include <string>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

constexpr int kShownPairs = 4;

std::uint64_t weight(int from, int to, std::size_t count) {
  if (count == 0) return 0;
  return mix(mix(mix(1, static_cast<std::uint64_t>(from)), static_cast<std::uint64_t>(to)), count);
}

}  // namespace

void set_splits(Signature& signature, int rank, std::span<const Item> items) {
  std::uint64_t balance = 0;
  for (std::size_t q = 0; q < items.size(); ++q) {
    const int other = static_cast<int>(q);
    balance += weight(rank, other, items[q].count) - weight(other, rank, items[q].out_count);
  }
  signature.counts[0] = balance;
  signature.counts[1] = SplitStream(rank, items, size_of(signature.dtype)).nbytes();
}

bool splits_match(int world_size, const SignatureOf& signature_of) {
  std::uint64_t balance = 0;
  for (int q = 0; q < world_size; ++q) balance += signature_of(q).counts[0];
  return balance == 0;
}

SplitCounts split_counts(std::span<const Item> items) {
  SplitCounts counts;
  for (const Item& item : items) counts.push_back(item.count);
  for (const Item& item : items) counts.push_back(item.out_count);
  return counts;
}

void throw_split_mismatch(const Signature& first, const std::vector<SplitCounts>& by_rank) {
  const std::size_t ranks = by_rank.size();
  std::string pairs;
  int found = 0;
  for (std::size_t from = 0; from < ranks; ++from)
    for (std::size_t to = 0; to < ranks; ++to) {
      const std::uint64_t sent = by_rank[from][to], expected = by_rank[to][ranks + from];
      if (sent == expected || ++found > kShownPairs) continue;
      pairs += text(pairs.empty() ? "" : "; ", "rank ", from, " sends ", sent, " elements to rank ", to,
                    ", which expects ", expected);
    }
  if (found > kShownPairs) pairs += text("; and ", found - kShownPairs, " more");
  throw CollectiveMismatch(
      text("ranks disagree on the counts of operation ", first.sequence, ", rank 0: ", describe(first), ": ", pairs));
}

}  // namespace zcomm::coll
