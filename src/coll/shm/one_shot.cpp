// Small operations (coll/shm/one_shot.hpp).
#include "coll/shm/one_shot.hpp"

#include <algorithm>
#include <cstring>

#include "device/kernels.hpp"

namespace zcomm::coll {
namespace {

constexpr std::size_t kAlign = 32;  // of each item in a room
constexpr std::size_t kItems = 16;  // longer lists gain nothing from a single meeting

std::size_t aligned(std::size_t nbytes) { return (nbytes + kAlign - 1) / kAlign * kAlign; }

/// Bytes of one item that a rank has to publish; at the root for scatter.
std::size_t shown_nbytes(const Signature& signature, const Item& item, int world_size) {
  const bool parts = signature.kind == OpKind::reduce_scatter || signature.kind == OpKind::scatter;
  return item.count * (parts ? static_cast<std::size_t>(world_size) : 1) * size_of(signature.dtype);
}

}  // namespace

OneShotPath::OneShotPath(const HostMemory& memory, std::size_t limit_nbytes)
    : memory_(memory),
      rank_(memory.rank()),
      world_size_(memory.world_size()),
      limit_nbytes_(std::min(limit_nbytes, HostMemory::kMailNbytes)),
      rooms_(static_cast<std::size_t>(memory.world_size())),
      sources_(static_cast<std::size_t>(memory.world_size())) {}

bool OneShotPath::takes(const Operation& operation) const {
  const Signature& signature = operation.signature;
  if (!moves_data(signature.kind) || signature.kind == OpKind::all_to_all || world_size_ == 1) return false;
  // An upper bound of the bytes that any rank publishes, from numbers that all ranks compare. count: all ranks' parts.
  const std::size_t padding = signature.buffers * kAlign;
  return signature.buffers <= kItems && signature.count <= limit_nbytes_ &&
         signature.count * size_of(signature.dtype) + padding <= limit_nbytes_;
}

std::byte* OneShotPath::room(int rank, std::uint32_t sequence, std::size_t nbytes) const {
  if (nbytes <= Entry::kPayloadNbytes) return memory_.block(rank).entries[sequence & 1].payload;
  return memory_.mail(rank, sequence);
}

void OneShotPath::bring(const Operation& operation, std::uint32_t sequence) {
  const Signature& signature = operation.signature;
  std::size_t nbytes = 0;
  for (const Item& item : operation.items.all()) nbytes += aligned(shown_nbytes(signature, item, world_size_));
  for (int q = 0; q < world_size_; ++q) rooms_[static_cast<std::size_t>(q)] = room(q, sequence, nbytes);
  const bool from_root = signature.kind == OpKind::broadcast || signature.kind == OpKind::scatter;
  if (from_root && signature.root != rank_) return;
  std::byte* to = rooms_[static_cast<std::size_t>(rank_)];
  for (const Item& item : operation.items.all()) {
    const std::size_t shown = shown_nbytes(signature, item, world_size_);
    if (shown != 0) std::memcpy(to, item.in, shown);
    to += aligned(shown);
  }
}

void OneShotPath::finish(const Operation& operation) {
  const Signature& signature = operation.signature;
  std::size_t offset = 0;
  for (const Item& item : operation.items.all()) {
    if (item.count == 0) continue;
    switch (signature.kind) {
      case OpKind::reduce:
        if (signature.root != rank_) break;
        [[fallthrough]];
      case OpKind::all_reduce:
        reduce(operation, item, offset, 0, item.count);
        break;
      case OpKind::reduce_scatter:
        reduce(operation, item, offset, static_cast<std::size_t>(rank_) * item.count, item.count);
        break;
      default:
        collect(operation, item, offset);
    }
    offset += aligned(shown_nbytes(signature, item, world_size_));
  }
}

void OneShotPath::reduce(const Operation& operation, const Item& item, std::size_t offset, std::size_t begin,
                         std::size_t count) {
  const Signature& signature = operation.signature;
  for (std::size_t q = 0; q < rooms_.size(); ++q) sources_[q] = rooms_[q] + offset + begin * size_of(signature.dtype);
  void* const target = item.out;
  device::reduce({.dst = {&target, 1},
                  .src = sources_,
                  .count = count,
                  .in = signature.dtype,
                  .out = signature.out_dtype,
                  .op = signature.op,
                  .accumulate = signature.accumulate});
}

void OneShotPath::collect(const Operation& operation, const Item& item, std::size_t offset) {
  const Signature& signature = operation.signature;
  const std::size_t nbytes = item.count * size_of(signature.dtype);
  const auto root = static_cast<std::size_t>(std::max(signature.root, 0)), me = static_cast<std::size_t>(rank_);
  switch (signature.kind) {
    case OpKind::gather:
      if (signature.root != rank_) return;
      [[fallthrough]];
    case OpKind::all_gather:
      for (std::size_t q = 0; q < rooms_.size(); ++q) std::memcpy(item.out + q * nbytes, rooms_[q] + offset, nbytes);
      return;
    case OpKind::broadcast:
      if (signature.root != rank_) std::memcpy(item.out, rooms_[root] + offset, nbytes);
      return;
    default:  // scatter
      std::memcpy(item.out, rooms_[root] + offset + me * nbytes, nbytes);
  }
}

}  // namespace zcomm::coll
