// OptimBatch: the steps of many parameters as one call, divided among the threads like one array.
//
// A small parameter's step is shorter than waking a thread, or than a call from Python with its arguments; a batch pays
// for both once. It is prepared once (add) and stepped while weights, states and counters keep their addresses;
// gradients may move from step to step. Bits are the same as with a step per shard, however many there are. Thread
// rule: one call at a time per batch.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "zcomm/exact_sum.hpp"
#include "zcomm/optim_shard.hpp"

namespace zcomm {

/// shard: its grad is passed to each step; an addend keeps its address. group: the index of the parameters for its
/// step. counter: the number of steps so far, as f32 (torch's `step`), read and incremented by each step; null for
/// optimizers without a count. buffer, first: as in SgdParams.
struct OptimBatchItem {
  OptimShard shard;
  std::size_t group = 0;
  float* counter = nullptr;
  bool buffer = false, first = false;
};

/// Params: AdamParams, SgdParams, LionParams or AdagradParams.
template <class Params>
class OptimBatch {
 public:
  OptimBatch();
  ~OptimBatch();
  OptimBatch(OptimBatch&&) noexcept;
  OptimBatch& operator=(OptimBatch&&) noexcept;

  void add(const OptimBatchItem& item);
  std::size_t size() const;

  /// One step of all items: item i with groups[its group], in which the item's own replace `step`, `buffer` and
  /// `first`, and grads[i]. squares: as in adam_step, of all gradients.
  /// Throws InvalidArgument as the optimizer's own step does, and if grads or groups are too few; then nothing has
  /// changed. Allocates nothing after the first call.
  void step(std::span<const Params> groups, std::span<const void* const> grads, int threads = 0,
            ExactSum* squares = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zcomm
