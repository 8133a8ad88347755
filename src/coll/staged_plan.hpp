// StagedPlan: the pipeline of collectives through staging slots, as one rank's lists of actions.
//
// Three stages over steps (coll/steps.hpp): copy_in(t) | reduce(t - lag) | copy_out(t - larger lag); next() advances t.
// Each rank has one slot per step, which its peers read. A send copies from the input to the own slot, a recv from a
// peer's slot to the output, a reduce reads the own part of the input and the peers' slots (at the same offset in
// each), in rank order. The engine decides how ranks wait for each other, and for free slots: see coll/shm/staged.hpp
// and coll/cuda/ipc_staged.hpp. Invariants: all ranks see the same steps. A rank's own part does not pass through its
// slot on the way in. Each element is reduced once, in rank order, by its owner (decision D3). A stage reads only
// peers' data that an earlier stage of the same step wrote to that slot. Actions of one stage do not depend on each
// other. Once warm, nothing is allocated. Thread rule: one thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "coll/plan.hpp"
#include "coll/signature.hpp"
#include "coll/steps.hpp"

namespace zcomm::coll {

/// The distances between the stages of a pipeline, in steps.
struct Lags {
  std::uint32_t reduce, out;
  /// Of counters per stage. With one or two slots the distances must be smaller, or a claim would wait for a step that
  /// waits for it.
  static constexpr Lags of_slots(int slot_count) {
    return {slot_count > 1 ? 1u : 0u, slot_count > 2 ? 2u : static_cast<std::uint32_t>(slot_count - 1)};
  }
  /// Of rounds: a round completes all work before it.
  static constexpr Lags of_rounds(OpKind kind) { return {1, reduces(kind) ? 2u : 1u}; }
};

class StagedPlan {
 public:
  struct Shape {
    OpKind kind;
    int root, rank, world_size;
    std::size_t element_nbytes, slot_nbytes;
    Lags lags;
  };
  /// One stage of one step.
  struct Stage {
    bool runs = false;
    std::uint32_t step = 0;
    std::vector<Action> actions{};
  };

  /// Any kind but all_to_all. `items` must live until the last next(); their pointers are not used.
  void start(const Shape& shape, std::span<const Item> items);
  /// Advances to the next lists; false if there are none.
  bool next();

  const Stage& copy_in() const { return copy_in_; }
  const Stage& reduce() const { return reduce_; }
  const Stage& copy_out() const { return copy_out_; }

  /// Whether the peers need this rank's slot, so that it must be free before copy_in, even if that list is empty.
  bool fills_slot() const;
  /// Whether this rank needs the peers' slots in copy_out.
  bool reads_slots() const;
  /// Steps so far; after the last next(), of the operation.
  std::uint32_t step_count() const { return steps_made_; }

 private:
  bool is_root() const { return shape_.root == shape_.rank; }
  bool enter(Stage& stage, std::uint32_t lag);
  const Step& step_of(const Stage& stage) const { return steps_[stage.step % steps_.size()]; }
  void plan_copy_in(const Piece& piece);
  void plan_reduce(const Piece& piece);
  void plan_copy_out(const Piece& piece);
  void send(const Piece& piece, int peer, std::size_t in, std::size_t in_slot, std::size_t count);

  Shape shape_{};
  std::span<const Item> items_;
  StepCursor cursor_{{}, 1, 1, 0};
  std::array<Step, 3> steps_;  // in flight
  std::uint32_t turn_ = 0, steps_made_ = 0;
  bool more_ = false;
  Stage copy_in_, reduce_, copy_out_;
};

}  // namespace zcomm::coll
