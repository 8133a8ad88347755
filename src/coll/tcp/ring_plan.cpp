// See ring_plan.hpp.
#include "coll/tcp/ring_plan.hpp"

#include <algorithm>

namespace zcomm::coll {
namespace {

constexpr std::size_t kLaneAlign = 64;  // elements

}  // namespace

using Kind = Action::Kind;
using Memory = Action::Memory;

RingPlan::RingPlan(const Shape& shape, const TcpChunks& chunks) : shape_(shape), chunks_(&chunks) {
  const auto others = static_cast<std::size_t>(shape.world_size - 1);
  reduce_steps_ = shape.reduces ? others : 0;
  steps_ = reduce_steps_ + (shape.gathers ? others : 0);
  const std::size_t longest = chunk_of(chunks.largest(), shape.lanes, 0, kLaneAlign).count();
  const std::size_t group_count = kWindow * shape.segment_count;
  groups_ = (longest + group_count - 1) / group_count;
}

/// The number of segments before number i that pass through slots: segments of all steps that reduce but one, from
/// `first_step` on. Received sums do from step 0 on (the last step's are finished immediately), sent ones from step 1
/// on.
std::size_t RingPlan::slots_before(std::size_t i, std::size_t first_step) const {
  if (reduce_steps_ == 0) return 0;
  const std::size_t per_group = (reduce_steps_ - 1) * kWindow, skipped = first_step * kWindow;
  const std::size_t group = i / (steps_ * kWindow), at = i % (steps_ * kWindow);
  return group * per_group + std::min(std::max(at, skipped) - skipped, per_group);
}

int RingPlan::chunk_sent(std::size_t step) const {
  const int world = shape_.world_size;
  const int distance = static_cast<int>(step < reduce_steps_ ? step + 1 : step - reduce_steps_);
  return (shape_.rank + (shape_.way == 0 ? -distance : distance) + world) % world;
}

int RingPlan::chunk_received(std::size_t step) const {
  const int world = shape_.world_size;
  return (chunk_sent(step) + (shape_.way == 0 ? -1 : 1) + world) % world;
}

/// The elements of segment i: in its group, the lane's part of `chunk`.
Action RingPlan::segment(std::size_t i, int chunk) const {
  const Range mine = chunk_of(chunks_->count(chunk), shape_.lanes, shape_.lane, kLaneAlign);
  const std::size_t group = i / (steps_ * kWindow);
  const std::size_t first = mine.begin + (group * kWindow + i % kWindow) * shape_.segment_count;
  const std::size_t begin = std::min(first, mine.end), end = std::min(first + shape_.segment_count, mine.end);
  return {.buffer = static_cast<std::size_t>(chunk), .in = begin, .out = begin, .count = end - begin};
}

Action RingPlan::send(std::size_t i) const {
  const std::size_t step = step_of(i);
  Action action = segment(i, chunk_sent(step));
  action.kind = Kind::send;
  action.peer = (shape_.rank + (shape_.way == 0 ? 1 : shape_.world_size - 1)) % shape_.world_size;
  if (step >= reduce_steps_) {
    action.from = Memory::output;
  } else if (step == 0) {
    action.from = Memory::input;
  } else {
    action.from = Memory::slot;
    action.slot = slot(i, 1);
  }
  return action;
}

Action RingPlan::recv(std::size_t i) const {
  const std::size_t step = step_of(i);
  Action action = segment(i, chunk_received(step));
  action.kind = Kind::recv;
  action.peer = (shape_.rank + (shape_.way == 0 ? shape_.world_size - 1 : 1)) % shape_.world_size;
  if (step >= reduce_steps_) {
    action.to = Memory::output;
  } else if (step == 0 && shape_.raw_first) {
    action.to = Memory::raw;
  } else {
    action.to = Memory::slot;
    action.slot = slot(i, 0);
  }
  return action;
}

/// Adds the own part to the received partial sums.
Action RingPlan::reduce(std::size_t i) const {
  const std::size_t step = step_of(i);
  Action action = segment(i, chunk_received(step));
  action.kind = Kind::reduce;
  action.from = step == 0 && shape_.raw_first ? Memory::raw : Memory::slot;
  action.to = step + 1 == reduce_steps_ ? Memory::output : Memory::slot;
  action.slot = slot(i, 0);  // a finished sum also passes through it
  return action;
}

}  // namespace zcomm::coll
