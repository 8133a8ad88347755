// The staged pipeline (coll/shm/staged.hpp).
#include "coll/shm/staged.hpp"

#include <algorithm>
#include <cstring>

#include "coll/plan.hpp"
#include "device/kernels.hpp"

namespace zcomm::coll {

StagedPath::StagedPath(const HostMemory& memory, Liveness& liveness, SlotRing& slot_ring)
    : memory_(memory),
      liveness_(liveness),
      slot_ring_(slot_ring),
      rank_(memory.rank()),
      world_size_(memory.world_size()),
      sources_(static_cast<std::size_t>(memory.world_size())) {}

void StagedPath::run(const Operation& operation) {
  signature_ = &operation.signature;
  items_ = operation.items.all();
  element_nbytes_ = size_of(signature_->dtype);
  out_nbytes_ = size_of(signature_->out_dtype);
  const bool parts = signature_->kind == OpKind::reduce_scatter || signature_->kind == OpKind::scatter;
  StepCursor cursor(items_, element_nbytes_, parts ? static_cast<std::size_t>(world_size_) : 1, memory_.slot_nbytes());

  // Results that replace what has just been read find its lines in the cache.
  const bool replaces = signature_->kind == OpKind::all_reduce && !items_.empty() && items_[0].in == items_[0].out;
  out_stores_ = replaces ? device::Stores::cached : result_stores(signature_->count * element_nbytes_);

  const auto [reduce_lag, out_lag] = Lags(memory_.slot_count());
  const std::uint32_t base = slot_ring_.base();
  std::uint32_t total = 0;
  bool more = true;
  for (std::uint32_t c = 0; more || c < total + out_lag; ++c) {
    if (more && (more = cursor.next(steps_[c % 3]))) {
      ++total;
      copy_in(steps_[c % 3], base + c);
    }
    if (c >= reduce_lag && c - reduce_lag < total) reduce(steps_[(c - reduce_lag) % 3], base + c - reduce_lag);
    if (c >= out_lag && c - out_lag < total) copy_out(steps_[(c - out_lag) % 3], base + c - out_lag);
  }
  slot_ring_.advance(total);
}

void StagedPath::copy_in(const Step& step, std::uint32_t index) {
  if (brings()) {
    std::byte* slot = slot_ring_.claim(index);
    for (const Piece& piece : step.all()) bring(piece, slot + piece.offset);
  }
  slot_ring_.show(index);
}

/// Whether the others need anything of this rank.
bool StagedPath::brings() const {
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

void StagedPath::bring(const Piece& piece, std::byte* slot) {
  const Item& item = items_[piece.item];
  const std::byte* in = item.in + piece.begin * element_nbytes_;
  const std::size_t nbytes = piece.count * element_nbytes_;
  switch (signature_->kind) {
    case OpKind::all_reduce:
    case OpKind::reduce: {  // all but my own chunk, which reduce() reads where it is
      const Range mine = chunk_of(piece.count, world_size_, rank_, kChunkAlign);
      const std::size_t begin = mine.begin * element_nbytes_, end = mine.end * element_nbytes_;
      writer_.write(slot, in, begin);
      writer_.write(slot + end, in + end, nbytes - end);
      return;
    }
    case OpKind::reduce_scatter:
      for (int q = 0; q < world_size_; ++q) {
        const auto part = static_cast<std::size_t>(q);
        if (q != rank_) writer_.write(slot + part * piece.stride, in + part * item.count * element_nbytes_, nbytes);
      }
      return;
    case OpKind::scatter:
      for (int q = 0; q < world_size_; ++q) {
        const auto part = static_cast<std::size_t>(q);
        const std::byte* from = in + part * item.count * element_nbytes_;
        std::byte* to = q == rank_ ? item.out + piece.begin * element_nbytes_ : slot + part * piece.stride;
        if (q != rank_)
          writer_.write(to, from, nbytes);
        else if (to != from)
          device::copy(to, from, nbytes, out_stores_);
      }
      return;
    case OpKind::all_gather: {
      std::byte* own = item.out + (static_cast<std::size_t>(rank_) * item.count + piece.begin) * element_nbytes_;
      if (world_size_ > 1) writer_.write(slot, in, nbytes);
      if (own != in) device::copy(own, in, nbytes, out_stores_);
      return;
    }
    default:
      if (world_size_ > 1) writer_.write(slot, in, nbytes);
  }
}

void StagedPath::reduce(const Step& step, std::uint32_t index) {
  if (reduces(signature_->kind)) {
    liveness_.wait_for_peers(Stage::copied_in, index + 1);
    for (const Piece& piece : step.all()) reduce_piece(piece, index);
  }
  publish(memory_.own()[Stage::reduced], index + 1);
}

void StagedPath::reduce_piece(const Piece& piece, std::uint32_t index) {
  const Item& item = items_[piece.item];
  const bool scatter = signature_->kind == OpKind::reduce_scatter;
  const auto me = static_cast<std::size_t>(rank_);
  const Range mine = scatter ? Range{0, piece.count} : chunk_of(piece.count, world_size_, rank_, kChunkAlign);
  if (mine.count() == 0) return;
  const std::size_t in_slot = piece.offset + (scatter ? me * piece.stride : mine.begin * element_nbytes_);
  const std::size_t in_buffer = (scatter ? me * item.count : 0) + piece.begin + mine.begin;
  for (int q = 0; q < world_size_; ++q) {
    sources_[static_cast<std::size_t>(q)] =
        q == rank_ ? item.in + in_buffer * element_nbytes_ : memory_.slot(q, index) + in_slot;
  }
  // Once to where it belongs on this rank, once to where others fetch it; reduce: only one of them.
  void* const targets[] = {item.out + (piece.begin + mine.begin) * out_nbytes_, memory_.slot(rank_, index) + in_slot};
  const bool keeps = signature_->kind != OpKind::reduce || is_root();
  const bool gives = signature_->kind == OpKind::all_reduce ? world_size_ > 1 : !keeps;
  if (keeps && gives && writer_.stores() == device::Stores::streaming)
    return reduce_past_cache(targets[0], targets[1], mine.count());
  device::reduce({.dst = {targets + (keeps ? 0 : 1), keeps && gives ? 2u : 1u},
                  .src = sources_,
                  .count = mine.count(),
                  .in = signature_->dtype,
                  .out = signature_->out_dtype,
                  .op = signature_->op,
                  .accumulate = signature_->accumulate,
                  .stores = gives ? writer_.stores() : out_stores_});
}

/// The result may be where an input is, which rules non-temporal stores out: block by block, it is copied on from
/// there.
void StagedPath::reduce_past_cache(void* result, void* slot, std::size_t count) {
  constexpr std::size_t kBlock = 4096;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    device::reduce({.dst = {&result, 1},
                    .src = sources_,
                    .count = n,
                    .in = signature_->dtype,
                    .out = signature_->out_dtype,
                    .op = signature_->op,
                    .stores = device::Stores::cached});
    device::copy(slot, result, n * out_nbytes_, device::Stores::streaming);
    result = static_cast<std::byte*>(result) + n * out_nbytes_;
    slot = static_cast<std::byte*>(slot) + n * out_nbytes_;
    for (const void*& source : sources_) source = static_cast<const std::byte*>(source) + n * element_nbytes_;
  }
}

void StagedPath::copy_out(const Step& step, std::uint32_t index) {
  if (takes()) {
    if (signature_->kind == OpKind::broadcast || signature_->kind == OpKind::scatter)
      liveness_.wait(Stage::copied_in, signature_->root, index + 1);
    else
      liveness_.wait_for_peers(reduces(signature_->kind) ? Stage::reduced : Stage::copied_in, index + 1);
    for (const Piece& piece : step.all()) take(piece, index);
  }
  publish(memory_.own()[Stage::copied_out], index + 1);
}

/// Whether this rank needs anything of the others, beyond what it has reduced.
bool StagedPath::takes() const {
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

void StagedPath::take(const Piece& piece, std::uint32_t index) {
  const Item& item = items_[piece.item];
  const std::size_t nbytes = piece.count * element_nbytes_;
  const OpKind kind = signature_->kind;
  if (kind == OpKind::broadcast || kind == OpKind::scatter) {
    const std::size_t part = kind == OpKind::scatter ? static_cast<std::size_t>(rank_) * piece.stride : 0;
    device::copy(item.out + piece.begin * element_nbytes_, memory_.slot(signature_->root, index) + piece.offset + part,
                 nbytes, out_stores_);
    return;
  }
  for (int q = 0; q < world_size_; ++q) {
    if (kind == OpKind::all_gather || kind == OpKind::gather) {
      const std::size_t begin = static_cast<std::size_t>(q) * item.count + piece.begin;
      std::byte* to = item.out + begin * element_nbytes_;
      // all_gather's own part went there on the way in, when it was in the cache.
      const std::byte* from =
          q == rank_ ? item.in + piece.begin * element_nbytes_ : memory_.slot(q, index) + piece.offset;
      if (to != from && (q != rank_ || kind == OpKind::gather)) device::copy(to, from, nbytes, out_stores_);
    } else if (q != rank_) {
      const std::byte* from = memory_.slot(q, index) + piece.offset;
      const Range chunk = chunk_of(piece.count, world_size_, q, kChunkAlign);
      device::copy(item.out + (piece.begin + chunk.begin) * element_nbytes_, from + chunk.begin * element_nbytes_,
                   chunk.count() * element_nbytes_, out_stores_);
    }
  }
}

}  // namespace zcomm::coll
