// The pipeline over device slots (coll/cuda/ipc_staged.hpp).
#include "coll/cuda/ipc_staged.hpp"

#include <algorithm>

#include "coll/plan.hpp"
#include "coll/shm/staged.hpp"

namespace zcomm::coll {

DeviceSlots::DeviceSlots(device::Device& device, const HostMemory& memory, std::size_t slot_nbytes)
    : device_(device),
      rank_(static_cast<std::size_t>(memory.rank())),
      // Room for a piece of each rank, on lines of its own.
      slot_nbytes_((std::max(slot_nbytes, static_cast<std::size_t>(memory.world_size()) * 512) + 4095) / 4096 * 4096),
      memory_(static_cast<std::size_t>(memory.world_size())) {
  if (memory.world_size() > 1) memory_[rank_] = device.allocate(device::in_shared_blocks(kCount * slot_nbytes_));
}

void DeviceSlots::close_peers() noexcept {
  for (std::size_t r = 0; r < memory_.size(); ++r)
    if (r != rank_) memory_[r].reset();
}

DeviceStaged::DeviceStaged(const HostMemory& memory, DeviceRounds& rounds, const DeviceSlots& slots, int remote)
    : memory_(memory),
      rounds_(rounds),
      slots_(slots),
      rank_(memory.rank()),
      world_size_(memory.world_size()),
      remote_(remote),
      sources_(static_cast<std::size_t>(memory.world_size())),
      begins_(static_cast<std::size_t>(memory.world_size())) {}

void DeviceStaged::run(const Operation& operation) {
  signature_ = &operation.signature;
  items_ = operation.items.all();
  element_nbytes_ = size_of(signature_->dtype);
  out_nbytes_ = size_of(signature_->out_dtype);
  const OpKind kind = signature_->kind;
  const bool parts = kind == OpKind::reduce_scatter || kind == OpKind::scatter;
  StepCursor cursor(items_, element_nbytes_, parts ? static_cast<std::size_t>(world_size_) : 1, slots_.slot_nbytes());
  const std::uint32_t out_lag = reduces(kind) ? 2 : 1, last_lag = kind == OpKind::reduce_scatter ? 1 : out_lag;
  std::uint32_t total = 0;
  bool more = true;
  for (std::uint32_t t = 0; more || t < total + last_lag; ++t) {
    if (more && (more = cursor.next(steps_[t % 3]))) {
      ++total;
      if (brings())
        for (const Piece& piece : steps_[t % 3].all()) bring(piece, t);
    }
    if (total == 0) return;  // on every rank
    if (reduces(kind) && t >= 1 && t - 1 < total)
      for (const Piece& piece : steps_[(t - 1) % 3].all()) reduce(piece, t - 1);
    if (takes() && t >= out_lag && t - out_lag < total)
      for (const Piece& piece : steps_[(t - out_lag) % 3].all()) take(piece, t - out_lag);
    rounds_.barrier();
  }
}

void DeviceStaged::copy(std::byte* to, const std::byte* from, std::size_t nbytes) {
  if (to != from && nbytes != 0) rounds_.stream().copy(to, from, nbytes);
}

/// Whether the others need anything of this rank.
bool DeviceStaged::brings() const {
  switch (signature_->kind) {
    case OpKind::broadcast:
    case OpKind::scatter:
      return is_root();
    case OpKind::gather:
      return !is_root();
    default:
      return true;
  }
}

/// Where the piece begins in the part of `item` that belongs to rank `part`.
const std::byte* DeviceStaged::own_input(const Item& item, const Piece& piece, int part) const {
  return item.in + (static_cast<std::size_t>(part) * item.count + piece.begin) * element_nbytes_;
}

void DeviceStaged::bring(const Piece& piece, std::uint32_t step) {
  const Item& item = items_[piece.item];
  const std::size_t nbytes = piece.count * element_nbytes_;
  std::byte* const slot = world_size_ > 1 ? slots_.slot(rank_, step) + piece.offset : nullptr;
  switch (signature_->kind) {
    case OpKind::all_reduce:
    case OpKind::reduce: {  // all but my own chunk, which reduce() reads where it is
      if (world_size_ == 1) return;
      const std::byte* in = own_input(item, piece, 0);
      const Range mine = chunk_of(piece.count, world_size_, rank_, kChunkAlign);
      const std::size_t begin = mine.begin * element_nbytes_, end = mine.end * element_nbytes_;
      copy(slot, in, begin);
      copy(slot + end, in + end, nbytes - end);
      return;
    }
    case OpKind::reduce_scatter:
    case OpKind::scatter:
      for (int q = 0; q < world_size_; ++q) {
        if (q != rank_)
          copy(slot + static_cast<std::size_t>(q) * piece.stride, own_input(item, piece, q), nbytes);
        else if (signature_->kind == OpKind::scatter)
          copy(item.out + piece.begin * element_nbytes_, own_input(item, piece, q), nbytes);
      }
      return;
    case OpKind::all_gather:
      copy(item.out + (static_cast<std::size_t>(rank_) * item.count + piece.begin) * element_nbytes_,
           own_input(item, piece, 0), nbytes);
      [[fallthrough]];
    default:
      if (world_size_ > 1) copy(slot, own_input(item, piece, 0), nbytes);
  }
}

void DeviceStaged::reduce(const Piece& piece, std::uint32_t step) {
  const Item& item = items_[piece.item];
  const bool scatters = signature_->kind == OpKind::reduce_scatter;
  const auto me = static_cast<std::size_t>(rank_);
  const Range mine = scatters ? Range{0, piece.count} : chunk_of(piece.count, world_size_, rank_, kChunkAlign);
  if (mine.count() == 0) return;
  const std::size_t in_slot = piece.offset + (scatters ? me * piece.stride : mine.begin * element_nbytes_);
  for (int q = 0; q < world_size_; ++q)
    sources_[static_cast<std::size_t>(q)] =
        q == rank_ ? own_input(item, piece, scatters ? rank_ : 0) + mine.begin * element_nbytes_
                   : slots_.slot(q, step) + in_slot;
  // Once to where it belongs on this rank, once to where others fetch it; reduce: only one of them.
  const bool keeps = signature_->kind != OpKind::reduce || is_root();
  const bool gives = signature_->kind == OpKind::all_reduce ? world_size_ > 1 : !keeps;
  void* const targets[] = {item.out + (piece.begin + mine.begin) * out_nbytes_,
                           gives ? slots_.slot(rank_, step) + in_slot : nullptr};
  rounds_.stream().kernels().reduce({.dst = {targets + (keeps ? 0 : 1), keeps && gives ? 2u : 1u},
                                     .src = sources_,
                                     .count = mine.count(),
                                     .in = signature_->dtype,
                                     .out = signature_->out_dtype,
                                     .op = signature_->op,
                                     .accumulate = signature_->accumulate,
                                     .remote = remote_});
}

/// Whether this rank needs anything of the others, beyond what it has reduced.
bool DeviceStaged::takes() const {
  switch (signature_->kind) {
    case OpKind::reduce_scatter:
      return false;
    case OpKind::broadcast:
    case OpKind::scatter:
      return !is_root();
    case OpKind::reduce:
    case OpKind::gather:
      return is_root();
    default:
      return true;
  }
}

void DeviceStaged::take(const Piece& piece, std::uint32_t step) {
  const Item& item = items_[piece.item];
  const std::size_t nbytes = piece.count * element_nbytes_;
  const OpKind kind = signature_->kind;
  if (kind == OpKind::broadcast || kind == OpKind::scatter) {
    const std::size_t part = kind == OpKind::scatter ? static_cast<std::size_t>(rank_) * piece.stride : 0;
    return copy(item.out + piece.begin * element_nbytes_, slots_.slot(signature_->root, step) + piece.offset + part,
                nbytes);
  }
  for (int i = 0; i < world_size_; ++i) {
    const int q = (rank_ + i) % world_size_;  // not all at the same rank's memory
    if (kind == OpKind::all_gather || kind == OpKind::gather) {
      std::byte* to = item.out + (static_cast<std::size_t>(q) * item.count + piece.begin) * element_nbytes_;
      if (q != rank_)
        copy(to, slots_.slot(q, step) + piece.offset, nbytes);
      else if (kind == OpKind::gather)  // all_gather's own part went there on the way in
        copy(to, own_input(item, piece, 0), nbytes);
    } else if (q != rank_) {
      const Range chunk = chunk_of(piece.count, world_size_, q, kChunkAlign);
      copy(item.out + (piece.begin + chunk.begin) * element_nbytes_,
           slots_.slot(q, step) + piece.offset + chunk.begin * element_nbytes_, chunk.count() * element_nbytes_);
    }
  }
}

}  // namespace zcomm::coll
