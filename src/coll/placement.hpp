// Placement: keeps ranks that have a CPU each from sharing one.
//
// Schedulers may leave two ranks that wait for each other in turns on one CPU for good, with another idle: never do
// both look busy for long. So each rank shows on which CPU it entered an operation or began to wait; of two on one CPU
// the higher rank, when it has to wait, moves to one where no rank is: it leaves this CPU out of its thread's mask and
// puts the mask back at once. Invariant: the mask is unchanged afterwards; at most one move in kRest. Thread rule: as
// Engine::run.
#pragma once

#include "coll/control_block.hpp"

namespace zcomm::coll {

class Placement {
 public:
  explicit Placement(const HostMemory& memory);

  /// Shows where this rank runs.
  void show() noexcept;
  /// Before waiting long for `peer`.
  void make_room(int peer) noexcept;

 private:
  const HostMemory& memory_;
  const bool has_own_cpu_;
  Clock::time_point rests_until_{};
};

}  // namespace zcomm::coll
