// The lists of the staged pipeline (coll/staged_plan.hpp).
#include "coll/staged_plan.hpp"

#include <algorithm>

namespace zcomm::coll {

using Kind = Action::Kind;
using Memory = Action::Memory;

void StagedPlan::start(const Shape& shape, std::span<const Item> items) {
  shape_ = shape;
  // Nothing follows reduce_scatter's reduction.
  if (shape.kind == OpKind::reduce_scatter) shape_.lags.out = shape.lags.reduce;
  // A single rank waits for none, so each step ends at once.
  if (shape.world_size == 1) shape_.lags = {0, 0};
  items_ = items;
  const bool parts = shape.kind == OpKind::reduce_scatter || shape.kind == OpKind::scatter;
  cursor_ = StepCursor(items, shape.element_nbytes, parts ? static_cast<std::size_t>(shape.world_size) : 1,
                       shape.slot_nbytes);
  turn_ = steps_made_ = 0;
  more_ = true;
}

bool StagedPlan::next() {
  const std::uint32_t turn = turn_++;
  if (more_ && (more_ = cursor_.next(steps_[turn % steps_.size()]))) ++steps_made_;
  if (!more_ && turn >= steps_made_ + shape_.lags.out) return false;
  if (enter(copy_in_, 0) && fills_slot())
    for (const Piece& piece : step_of(copy_in_).all()) plan_copy_in(piece);
  if (enter(reduce_, shape_.lags.reduce) && reduces(shape_.kind))
    for (const Piece& piece : step_of(reduce_).all()) plan_reduce(piece);
  if (enter(copy_out_, shape_.lags.out) && reads_slots())
    for (const Piece& piece : step_of(copy_out_).all()) plan_copy_out(piece);
  return true;
}

bool StagedPlan::enter(Stage& stage, std::uint32_t lag) {
  stage.actions.clear();
  stage.step = turn_ - 1 - lag;  // wraps around while the stage does not run yet
  stage.runs = turn_ > lag && stage.step < steps_made_;
  return stage.runs;
}

bool StagedPlan::fills_slot() const {
  switch (shape_.kind) {
    case OpKind::broadcast:
    case OpKind::scatter:
      return is_root();
    case OpKind::gather:
      return !is_root();
    default:
      return true;
  }
}

bool StagedPlan::reads_slots() const {
  switch (shape_.kind) {
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

void StagedPlan::send(const Piece& piece, int peer, std::size_t in, std::size_t in_slot, std::size_t count) {
  if (count == 0 || shape_.world_size == 1) return;
  copy_in_.actions.push_back({.kind = Kind::send,
                              .from = Memory::input,
                              .to = Memory::slot,
                              .peer = peer,
                              .buffer = piece.item,
                              .in = in,
                              .slot = piece.offset + in_slot,
                              .count = count});
}

void StagedPlan::plan_copy_in(const Piece& piece) {
  const std::size_t item_count = items_[piece.item].count;
  const auto copy_own = [&](std::size_t in, std::size_t out) {
    copy_in_.actions.push_back({.kind = Kind::copy,
                                .from = Memory::input,
                                .to = Memory::output,
                                .buffer = piece.item,
                                .in = in,
                                .out = out,
                                .count = piece.count});
  };
  switch (shape_.kind) {
    case OpKind::all_reduce:
    case OpKind::reduce: {  // all but the own chunk, which reduce reads from the input
      if (shape_.world_size == 1) return;
      const Range mine = chunk_of(piece.count, shape_.world_size, shape_.rank, kChunkAlign);
      send(piece, -1, piece.begin, 0, mine.begin);
      send(piece, -1, piece.begin + mine.end, mine.end * shape_.element_nbytes, piece.count - mine.end);
      return;
    }
    case OpKind::reduce_scatter:
    case OpKind::scatter:
      for (int q = 0; q < shape_.world_size; ++q) {
        const auto part = static_cast<std::size_t>(q);
        const std::size_t in = part * item_count + piece.begin;
        if (q != shape_.rank)
          send(piece, q, in, part * piece.stride, piece.count);
        else if (shape_.kind == OpKind::scatter)
          copy_own(in, piece.begin);
      }
      return;
    case OpKind::all_gather:
      send(piece, -1, piece.begin, 0, piece.count);
      copy_own(piece.begin,
               static_cast<std::size_t>(shape_.rank) * item_count + piece.begin);  // it is in the cache now
      return;
    default:
      send(piece, -1, piece.begin, 0, piece.count);
  }
}

void StagedPlan::plan_reduce(const Piece& piece) {
  const bool scatters = shape_.kind == OpKind::reduce_scatter;
  const Range mine =
      scatters ? Range{0, piece.count} : chunk_of(piece.count, shape_.world_size, shape_.rank, kChunkAlign);
  if (mine.count() == 0) return;
  const auto me = static_cast<std::size_t>(shape_.rank);
  // Once to where it belongs on this rank, once to where others fetch it; reduce: only one of them.
  const bool keeps = shape_.kind != OpKind::reduce || is_root();
  const bool gives = shape_.kind == OpKind::all_reduce ? shape_.world_size > 1 : !keeps;
  reduce_.actions.push_back({.kind = Kind::reduce,
                             .from = Memory::slot,
                             .to = keeps ? Memory::output : Memory::slot,
                             .also_to = keeps && gives ? Memory::slot : Memory::none,
                             .buffer = piece.item,
                             .in = (scatters ? me * items_[piece.item].count : 0) + piece.begin + mine.begin,
                             .out = piece.begin + mine.begin,
                             .slot = piece.offset + (scatters ? me * piece.stride : mine.begin * shape_.element_nbytes),
                             .count = mine.count()});
}

void StagedPlan::plan_copy_out(const Piece& piece) {
  const auto recv = [&](int peer, std::size_t out, std::size_t in_slot, std::size_t count) {
    if (count == 0) return;
    copy_out_.actions.push_back({.kind = Kind::recv,
                                 .from = Memory::slot,
                                 .to = Memory::output,
                                 .peer = peer,
                                 .buffer = piece.item,
                                 .out = out,
                                 .slot = piece.offset + in_slot,
                                 .count = count});
  };
  const OpKind kind = shape_.kind;
  if (kind == OpKind::broadcast || kind == OpKind::scatter) {
    const std::size_t part = kind == OpKind::scatter ? static_cast<std::size_t>(shape_.rank) * piece.stride : 0;
    return recv(shape_.root, piece.begin, part, piece.count);
  }
  for (int i = 0; i < shape_.world_size; ++i) {
    const int q = (shape_.rank + i) % shape_.world_size;  // not all at the same rank's memory
    if (kind == OpKind::all_gather || kind == OpKind::gather) {
      const std::size_t out = static_cast<std::size_t>(q) * items_[piece.item].count + piece.begin;
      if (q != shape_.rank)
        recv(q, out, 0, piece.count);
      else if (kind == OpKind::gather)  // all_gather's own part went there on the way in
        copy_out_.actions.push_back({.kind = Kind::copy,
                                     .from = Memory::input,
                                     .to = Memory::output,
                                     .buffer = piece.item,
                                     .in = piece.begin,
                                     .out = out,
                                     .count = piece.count});
    } else if (q != shape_.rank) {
      const Range chunk = chunk_of(piece.count, shape_.world_size, q, kChunkAlign);
      recv(q, piece.begin + chunk.begin, chunk.begin * shape_.element_nbytes, chunk.count());
    }
  }
}

}  // namespace zcomm::coll
