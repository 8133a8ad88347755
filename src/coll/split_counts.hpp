// Splits: the counts of all_to_all, which only the two ranks of each pair know, and the check that compares them.
//
// [Note: balance] Each rank adds a hash of (sender, receiver, count) for each part that it sends and subtracts one for
// each part that it expects. The signature carries the result, which adds up to 0 over all ranks if each count has its
// match. So the check costs one word per rank, and counts travel only to report a difference. Thread rule: pure
// functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "coll/operation.hpp"

namespace zcomm::coll {

/// The parts that a rank sends, as a stream through its slots: a table of `world_size` offsets (64-bit, from the
/// stream's beginning), then the parts for rank + 1, rank + 2, ..., each at a whole line. Empty if nothing is sent.
class SplitStream {
 public:
  SplitStream(int rank, std::span<const Item> items, std::size_t element_nbytes)
      : rank_(rank), world_size_(static_cast<int>(items.size())), items_(items), element_nbytes_(element_nbytes) {}

  std::size_t table_nbytes() const { return whole_lines(items_.size() * sizeof(std::uint64_t)); }
  std::size_t nbytes() const {
    const std::size_t end = for_each([](int, std::size_t, std::size_t) {});
    return end == table_nbytes() ? 0 : end;
  }
  /// Calls body(receiver, begin, nbytes) for each part, in order; returns the end of the last.
  template <class Body>
  std::size_t for_each(const Body& body) const {
    std::size_t at = table_nbytes();
    for (int i = 1; i < world_size_; ++i) {
      const int to = (rank_ + i) % world_size_;  // at any time each rank sends to another one
      const std::size_t part = items_[static_cast<std::size_t>(to)].count * element_nbytes_;
      body(to, at, part);
      at += whole_lines(part);
    }
    return at;
  }

 private:
  static std::size_t whole_lines(std::size_t nbytes) { return (nbytes + 63) / 64 * 64; }

  int rank_, world_size_;
  std::span<const Item> items_;
  std::size_t element_nbytes_;
};

/// Puts the balance and the length of the stream into the signature of an all_to_all.
void set_splits(Signature& signature, int rank, std::span<const Item> items);
/// Bytes of that rank's stream.
inline std::size_t stream_nbytes(const Signature& signature) { return signature.counts[1]; }

/// Whether each rank sends the counts that its receivers expect, as far as the signatures of all ranks tell.
bool splits_match(int world_size, const SignatureOf& signature_of);

/// The counts of one rank: to each rank, then from each.
using SplitCounts = std::vector<std::uint64_t>;
SplitCounts split_counts(std::span<const Item> items);
/// Throws CollectiveMismatch naming the two ranks that differ, given the counts of all ranks.
[[noreturn]] void throw_split_mismatch(const Signature& first, const std::vector<SplitCounts>& by_rank);

}  // namespace zcomm::coll
