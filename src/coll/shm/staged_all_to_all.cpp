// The pipeline of all_to_all (coll/shm/staged_all_to_all.hpp).
#include "coll/shm/staged_all_to_all.hpp"

#include <algorithm>
#include <cstring>

#include "coll/staged_plan.hpp"

namespace zcomm::coll {
namespace {

/// Bytes [begin, end) that a part and a step's slot have in common; begin >= end if none.
struct Overlap {
  std::size_t begin, end;
  Overlap(std::size_t part, std::size_t part_nbytes, std::size_t slot, std::size_t slot_nbytes)
      : begin(std::max(part, slot)), end(std::min(part + part_nbytes, slot + slot_nbytes)) {}
  bool empty() const { return begin >= end; }
  std::size_t nbytes() const { return end - begin; }
};

}  // namespace

StagedAllToAll::StagedAllToAll(const HostMemory& memory, SlotRing& slot_ring)
    : memory_(memory),
      slot_ring_(slot_ring),
      rank_(memory.rank()),
      world_size_(memory.world_size()),
      begins_(static_cast<std::size_t>(memory.world_size())) {}

void StagedAllToAll::compare(const Operation& operation, const SignatureOf& signature_of) {
  if (splits_match(world_size_, signature_of)) return;
  // All ranks see the mismatch and publish their counts; a slot has room for two words per rank (HostMemory).
  const std::uint32_t index = slot_ring_.base();
  const SplitCounts own = split_counts(operation.items.all());
  const std::size_t nbytes = own.size() * sizeof(own[0]);
  std::memcpy(slot_ring_.claim(index), own.data(), nbytes);
  slot_ring_.show(index);
  std::vector<SplitCounts> by_rank(static_cast<std::size_t>(world_size_), own);
  for (int q = 0; q < world_size_; ++q)
    std::memcpy(by_rank[static_cast<std::size_t>(q)].data(), slot_ring_.see(q, index), nbytes);
  throw_split_mismatch(signature_of(0), by_rank);
}

void StagedAllToAll::run(const Operation& operation, const SignatureOf& signature_of) {
  items_ = operation.items.all();
  element_nbytes_ = size_of(operation.signature.dtype);
  own_nbytes_ = stream_nbytes(operation.signature);
  const Item& own = items_[static_cast<std::size_t>(rank_)];
  if (own.count > 0 && own.in != own.out) device::copy(own.out, own.in, own.count * element_nbytes_);

  std::size_t longest = 0;
  for (int q = 0; q < world_size_; ++q) longest = std::max(longest, stream_nbytes(signature_of(q)));
  out_stores_ = result_stores(longest);
  const std::size_t slot = memory_.slot_nbytes();
  const auto total = static_cast<std::uint32_t>(longest / slot + (longest % slot != 0 ? 1 : 0));
  if (total == 0) return;
  const SplitStream stream(rank_, items_, element_nbytes_);
  const std::uint32_t out_lag = Lags::of_slots(memory_.slot_count()).out;
  for (std::uint32_t c = 0; c < total + out_lag; ++c) {
    if (c < total) copy_in(stream, c);
    if (c >= out_lag) copy_out(c - out_lag);
  }
  slot_ring_.advance(total);
}

void StagedAllToAll::copy_in(const SplitStream& stream, std::uint32_t step) {
  const std::uint32_t index = slot_ring_.base() + step;
  const std::size_t room = memory_.slot_nbytes(), at = step * room;
  if (at < own_nbytes_) {
    std::byte* slot = slot_ring_.claim(index);
    stream.for_each([&](int to, std::size_t begin, std::size_t nbytes) {
      const std::uint64_t place = begin;
      if (step == 0) std::memcpy(slot + static_cast<std::size_t>(to) * sizeof(place), &place, sizeof(place));
      const Overlap here(begin, nbytes, at, room);
      if (!here.empty())
        writer_.write(slot + (here.begin - at), items_[static_cast<std::size_t>(to)].in + (here.begin - begin),
                      here.nbytes());
    });
  }
  slot_ring_.show(index);
}

void StagedAllToAll::copy_out(std::uint32_t step) {
  const std::uint32_t index = slot_ring_.base() + step;
  const std::size_t room = memory_.slot_nbytes(), at = step * room;
  for (int i = 1; i < world_size_; ++i) {
    const int from = (rank_ - i + world_size_) % world_size_;  // the order in which parts arrive
    const auto q = static_cast<std::size_t>(from);
    const std::size_t nbytes = items_[q].out_count * element_nbytes_;
    if (nbytes == 0) continue;
    if (step == 0)
      std::memcpy(&begins_[q], slot_ring_.see(from, index) + static_cast<std::size_t>(rank_) * sizeof(begins_[q]),
                  sizeof(begins_[q]));
    const Overlap here(begins_[q], nbytes, at, room);
    if (!here.empty())
      device::copy(items_[q].out + (here.begin - begins_[q]), slot_ring_.see(from, index) + (here.begin - at),
                   here.nbytes(), out_stores_);
  }
  slot_ring_.release(index);
}

}  // namespace zcomm::coll
