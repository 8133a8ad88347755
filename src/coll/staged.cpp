// The staged pipeline (coll/staged.hpp).
#include "coll/staged.hpp"

#include <algorithm>
#include <cstring>

#include "coll/plan.hpp"
#include "device/kernels.hpp"

namespace zcomm::coll {

StagedPath::StagedPath(const HostMemory& memory, Watch& watch)
    : memory_(memory),
      watch_(watch),
      rank_(memory.rank()),
      world_size_(memory.world_size()),
      sources_(static_cast<std::size_t>(memory.world_size())) {}

void StagedPath::run(const Operation& operation) {
  header_ = &operation.header;
  items_ = operation.items.all();
  element_nbytes_ = size_of(header_->dtype);
  out_nbytes_ = size_of(header_->out_dtype);
  const bool scatter = header_->kind == OpKind::reduce_scatter;
  StepCursor cursor(items_, element_nbytes_, scatter ? static_cast<std::size_t>(world_size_) : 1,
                    memory_.slot_nbytes());

  // With one or two slots the stages must lie closer together, or copy_in would wait for a step that waits for it.
  const std::uint32_t slots = static_cast<std::uint32_t>(memory_.slot_count());
  const std::uint32_t reduce_lag = std::min(1u, slots - 1), out_lag = std::min(2u, slots - 1);
  std::uint32_t total = 0;
  bool more = true;
  for (std::uint32_t c = 0; more || c < total + out_lag; ++c) {
    if (more && (more = cursor.next(steps_[c % 3]))) {
      ++total;
      copy_in(steps_[c % 3], base_ + c);
    }
    if (c >= reduce_lag && c - reduce_lag < total) reduce(steps_[(c - reduce_lag) % 3], base_ + c - reduce_lag);
    if (c >= out_lag && c - out_lag < total) copy_out(steps_[(c - out_lag) % 3], base_ + c - out_lag);
  }
  base_ += total;
}

void StagedPath::copy_in(const Step& step, std::uint32_t index) {
  if (header_->kind != OpKind::broadcast || header_->root == rank_) {
    watch_.wait_for_peers(Stage::copied_out, index + 1 - static_cast<std::uint32_t>(memory_.slot_count()));
    for (const Piece& piece : step.all()) bring(piece, memory_.slot(rank_, index) + piece.offset);
  }
  publish(memory_.own()[Stage::copied_in], index + 1);
}

void StagedPath::bring(const Piece& piece, std::byte* slot) {
  const Item& item = items_[piece.item];
  const std::byte* in = item.in + piece.begin * element_nbytes_;
  const std::size_t nbytes = piece.count * element_nbytes_;
  switch (header_->kind) {
    case OpKind::all_reduce: {  // all but my own chunk, which reduce() reads where it is
      const Range mine = chunk_of(piece.count, world_size_, rank_, kChunkAlign);
      const std::size_t begin = mine.begin * element_nbytes_, end = mine.end * element_nbytes_;
      std::memcpy(slot, in, begin);
      std::memcpy(slot + end, in + end, nbytes - end);
      return;
    }
    case OpKind::reduce_scatter:
      for (int q = 0; q < world_size_; ++q) {
        const auto part = static_cast<std::size_t>(q);
        if (q != rank_) std::memcpy(slot + part * piece.stride, in + part * item.count * element_nbytes_, nbytes);
      }
      return;
    case OpKind::all_gather: {
      std::byte* own = item.out + (static_cast<std::size_t>(rank_) * item.count + piece.begin) * element_nbytes_;
      if (world_size_ > 1) std::memcpy(slot, in, nbytes);
      if (own != in) std::memcpy(own, in, nbytes);
      return;
    }
    default:
      if (world_size_ > 1) std::memcpy(slot, in, nbytes);
  }
}

void StagedPath::reduce(const Step& step, std::uint32_t index) {
  if (reduces(header_->kind)) {
    watch_.wait_for_peers(Stage::copied_in, index + 1);
    for (const Piece& piece : step.all()) reduce_piece(piece, index);
  }
  publish(memory_.own()[Stage::reduced], index + 1);
}

void StagedPath::reduce_piece(const Piece& piece, std::uint32_t index) {
  const Item& item = items_[piece.item];
  const bool scatter = header_->kind == OpKind::reduce_scatter;
  const auto me = static_cast<std::size_t>(rank_);
  const Range mine = scatter ? Range{0, piece.count} : chunk_of(piece.count, world_size_, rank_, kChunkAlign);
  if (mine.count() == 0) return;
  const std::size_t in_slot = piece.offset + (scatter ? me * piece.stride : mine.begin * element_nbytes_);
  const std::size_t in_buffer = (scatter ? me * item.count : 0) + piece.begin + mine.begin;
  for (int q = 0; q < world_size_; ++q) {
    sources_[static_cast<std::size_t>(q)] =
        q == rank_ ? item.in + in_buffer * element_nbytes_ : memory_.slot(q, index) + in_slot;
  }
  // all_reduce: once to where it belongs, once to where the others fetch it.
  void* const targets[] = {item.out + (piece.begin + mine.begin) * out_nbytes_, memory_.slot(rank_, index) + in_slot};
  device::reduce({.dst = {targets, scatter || world_size_ == 1 ? 1u : 2u},
                  .src = sources_,
                  .count = mine.count(),
                  .in = header_->dtype,
                  .out = header_->out_dtype,
                  .op = header_->op,
                  .accumulate = header_->accumulate});
}

void StagedPath::copy_out(const Step& step, std::uint32_t index) {
  switch (header_->kind) {
    case OpKind::all_reduce:
      watch_.wait_for_peers(Stage::reduced, index + 1);
      break;
    case OpKind::all_gather:
      watch_.wait_for_peers(Stage::copied_in, index + 1);
      break;
    case OpKind::broadcast:
      if (header_->root != rank_) watch_.wait(Stage::copied_in, header_->root, index + 1);
      break;
    default:
      break;
  }
  if (header_->kind != OpKind::reduce_scatter)
    for (const Piece& piece : step.all()) take(piece, index);
  publish(memory_.own()[Stage::copied_out], index + 1);
}

void StagedPath::take(const Piece& piece, std::uint32_t index) {
  const Item& item = items_[piece.item];
  if (header_->kind == OpKind::broadcast) {
    if (header_->root == rank_) return;
    std::memcpy(item.out + piece.begin * element_nbytes_, memory_.slot(header_->root, index) + piece.offset,
                piece.count * element_nbytes_);
    return;
  }
  for (int q = 0; q < world_size_; ++q) {
    if (q == rank_) continue;
    const std::byte* from = memory_.slot(q, index) + piece.offset;
    if (header_->kind == OpKind::all_gather) {
      const std::size_t to = static_cast<std::size_t>(q) * item.count + piece.begin;
      std::memcpy(item.out + to * element_nbytes_, from, piece.count * element_nbytes_);
    } else {
      const Range chunk = chunk_of(piece.count, world_size_, q, kChunkAlign);
      std::memcpy(item.out + (piece.begin + chunk.begin) * element_nbytes_, from + chunk.begin * element_nbytes_,
                  chunk.count() * element_nbytes_);
    }
  }
}

}  // namespace zcomm::coll
