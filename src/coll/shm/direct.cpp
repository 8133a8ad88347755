// Collectives on symmetric memory (coll/shm/direct.hpp).
#include "coll/shm/direct.hpp"

#include <algorithm>

#include "coll/plan.hpp"
#include "coll/shm/adaptive_store.hpp"
#include "device/kernels.hpp"

namespace zcomm::coll {
namespace {

constexpr std::size_t kPushBlock = 128 << 10;  // fits the second-level cache together with the written block

}  // namespace

Path choose_path(OpKind kind, int world_size, const std::function<const Entry&(int rank)>& entry_of) {
  const Entry& first = entry_of(0);
  bool in = first.place_in != 0, out = first.place_out != 0;
  for (int rank = 1; rank < world_size; ++rank) {
    in &= entry_of(rank).place_in == first.place_in;
    out &= entry_of(rank).place_out == first.place_out;
  }
  // push reads gathered data once, pull once per rank
  if (kind == OpKind::all_gather) return out ? Path::push : in ? Path::pull : Path::staged;
  return in ? Path::in_place : Path::staged;  // only inputs are read by peers; all_reduce's are its outputs
}

DirectPath::DirectPath(const HostMemory& memory, Liveness& liveness)
    : memory_(memory),
      liveness_(liveness),
      rank_(memory.rank()),
      world_size_(memory.world_size()),
      sources_(static_cast<std::size_t>(memory.world_size())),
      targets_(static_cast<std::size_t>(memory.world_size())) {}

void DirectPath::run(const Operation& operation, Path path) {
  const Signature& signature = operation.signature;
  for (const Item& item : operation.items.all()) {
    if (item.count == 0) continue;
    switch (signature.kind) {
      case OpKind::all_reduce:
        all_reduce(signature, item);
        break;
      case OpKind::reduce:
        reduce(signature, item);
        break;
      case OpKind::reduce_scatter:
        reduce_scatter(operation, item);
        break;
      case OpKind::all_gather:
        path == Path::pull ? pull(signature, item) : push(signature, item);
        break;
      default:
        broadcast(signature, item);
    }
  }
  publish(memory_.own()[Stage::done], ++done_);
  liveness_.wait_for_peers(Stage::done, done_);
}

void DirectPath::all_reduce(const Signature& signature, const Item& item) {
  const Range chunk = chunk_of(item.count, world_size_, rank_, kChunkAlign);
  if (chunk.count() == 0) return;
  const std::size_t begin = chunk.begin * size_of(signature.dtype);
  for (int q = 0; q < world_size_; ++q) {
    const auto i = static_cast<std::size_t>(q);
    targets_[i] = item.in_home->at_peer(q, item.in) + begin;
    sources_[i] = targets_[i];
  }
  device::reduce_in_parts({.dst = targets_,
                           .src = sources_,
                           .count = chunk.count(),
                           .in = signature.dtype,
                           .out = signature.dtype,
                           .op = signature.op});
}

void DirectPath::reduce(const Signature& signature, const Item& item) {
  const Range chunk = chunk_of(item.count, world_size_, rank_, kChunkAlign);
  if (chunk.count() == 0) return;
  const std::size_t begin = chunk.begin * size_of(signature.dtype);
  for (int q = 0; q < world_size_; ++q)
    sources_[static_cast<std::size_t>(q)] = item.in_home->at_peer(q, item.in) + begin;
  void* const target = item.in_home->at_peer(signature.root, item.in) + begin;
  device::reduce_in_parts({.dst = {&target, 1},
                           .src = sources_,
                           .count = chunk.count(),
                           .in = signature.dtype,
                           .out = signature.dtype,
                           .op = signature.op});
}

void DirectPath::reduce_scatter(const Operation& operation, const Item& item) {
  const Signature& signature = operation.signature;
  if (operation.own.empty()) return reduce_range(signature, item, {0, item.count}, nullptr, device::Stores::automatic);
  const device::Stores stores = result_stores(item.count * size_of(signature.out_dtype));  // by the total
  std::size_t done = 0;
  for (const OwnPart& part : operation.own) {
    reduce_range(signature, item, {done, part.begin}, nullptr, stores);
    done = part.begin + part.count;
    reduce_range(signature, item, {part.begin, done}, part.data, stores);
  }
  reduce_range(signature, item, {done, item.count}, nullptr, stores);
}

/// `range` of this rank's chunk; its own elements are at `own`, or in its buffer.
void DirectPath::reduce_range(const Signature& signature, const Item& item, Range range, const void* own,
                              device::Stores stores) {
  if (range.count() == 0) return;
  const std::size_t first = static_cast<std::size_t>(rank_) * item.count + range.begin;
  for (int q = 0; q < world_size_; ++q)
    sources_[static_cast<std::size_t>(q)] = item.in_home->at_peer(q, item.in) + first * size_of(signature.dtype);
  if (own != nullptr) sources_[static_cast<std::size_t>(rank_)] = own;
  void* const target = item.out + range.begin * size_of(signature.out_dtype);
  device::reduce_in_parts({.dst = {&target, 1},
                           .src = sources_,
                           .count = range.count(),
                           .in = signature.dtype,
                           .out = signature.out_dtype,
                           .op = signature.op,
                           .accumulate = signature.accumulate,
                           .stores = stores});
}

void DirectPath::pull(const Signature& signature, const Item& item) {
  const std::size_t nbytes = item.count * size_of(signature.dtype);
  for (int i = 0; i < world_size_; ++i) {
    const int q = (rank_ + i) % world_size_;  // not all at the same rank's memory
    const std::byte* from = item.in_home->at_peer(q, item.in);
    std::byte* to = item.out + static_cast<std::size_t>(q) * nbytes;
    if (to != from) device::copy(to, from, nbytes);
  }
}

/// Block by block, so that data sent to several ranks is read from memory once.
void DirectPath::push(const Signature& signature, const Item& item) {
  const std::size_t nbytes = item.count * size_of(signature.dtype);
  const device::Stores stores = result_stores(nbytes * static_cast<std::size_t>(world_size_));
  for (std::size_t begin = 0; begin < nbytes; begin += kPushBlock) {
    const std::size_t n = std::min(kPushBlock, nbytes - begin);
    for (int i = 0; i < world_size_; ++i) {
      const int q = (rank_ + i) % world_size_;  // not all into the same rank's memory
      std::byte* to = item.out_home->at_peer(q, item.out) + static_cast<std::size_t>(rank_) * nbytes;
      if (to != item.in) device::copy(to + begin, item.in + begin, n, stores);
    }
  }
}

void DirectPath::broadcast(const Signature& signature, const Item& item) {
  if (signature.root == rank_) return;
  device::copy(item.out, item.in_home->at_peer(signature.root, item.in), item.count * size_of(signature.dtype));
}

}  // namespace zcomm::coll
