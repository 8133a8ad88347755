// Collectives on symmetric device memory (coll/cuda/ipc_direct.hpp).
#include "coll/cuda/ipc_direct.hpp"

#include "coll/plan.hpp"

namespace zcomm::coll {

DeviceDirect::DeviceDirect(const HostMemory& memory, DeviceRounds& rounds, int remote)
    : stream_(rounds.stream()),
      rank_(memory.rank()),
      world_size_(memory.world_size()),
      remote_(remote),
      sources_(static_cast<std::size_t>(memory.world_size())) {}

void DeviceDirect::run(const Operation& operation, Path path) {
  const Signature& signature = operation.signature;
  for (const Item& item : operation.items.all()) {
    if (item.count == 0) continue;
    if (reduces(signature.kind))
      reduce(signature, item);
    else if (signature.kind == OpKind::all_gather)
      path == Path::pull ? pull(signature, item) : push(signature, item);
    else if (signature.root != rank_)  // broadcast
      stream_.copy(item.out, item.in_home->at_peer(signature.root, item.in), item.count * size_of(signature.dtype));
  }
}

void DeviceDirect::reduce(const Signature& signature, const Item& item) {
  const bool scatters = signature.kind == OpKind::reduce_scatter;
  const std::size_t first = static_cast<std::size_t>(rank_) * item.count;
  const Range chunk =
      scatters ? Range{first, first + item.count} : chunk_of(item.count, world_size_, rank_, kChunkAlign);
  if (chunk.count() == 0) return;
  const std::size_t begin = chunk.begin * size_of(signature.dtype);
  targets_.clear();
  for (int q = 0; q < world_size_; ++q) {
    std::byte* const place = item.in_home->at_peer(q, item.in) + begin;
    sources_[static_cast<std::size_t>(q)] = place;
    if (signature.kind == OpKind::all_reduce || (signature.kind == OpKind::reduce && signature.root == q))
      targets_.push_back(place);
  }
  if (scatters) targets_.push_back(item.out);
  stream_.kernels().reduce({.dst = targets_,
                            .src = sources_,
                            .count = chunk.count(),
                            .in = signature.dtype,
                            .out = signature.out_dtype,
                            .op = signature.op,
                            .accumulate = signature.accumulate,
                            .remote = remote_});
}

void DeviceDirect::pull(const Signature& signature, const Item& item) {
  const std::size_t nbytes = item.count * size_of(signature.dtype);
  for (int i = 0; i < world_size_; ++i) {
    const int q = (rank_ + i) % world_size_;  // not all at the same rank's memory
    const std::byte* from = item.in_home->at_peer(q, item.in);
    std::byte* to = item.out + static_cast<std::size_t>(q) * nbytes;
    if (to != from) stream_.copy(to, from, nbytes);
  }
}

void DeviceDirect::push(const Signature& signature, const Item& item) {
  const std::size_t nbytes = item.count * size_of(signature.dtype);
  for (int i = 0; i < world_size_; ++i) {
    const int q = (rank_ + i) % world_size_;
    std::byte* to = item.out_home->at_peer(q, item.out) + static_cast<std::size_t>(rank_) * nbytes;
    if (to != item.in) stream_.copy(to, item.in, nbytes);
  }
}

}  // namespace zcomm::coll
