// The staged pipeline on the host (coll/shm/staged.hpp).
#include "coll/shm/staged.hpp"

#include <algorithm>

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

  // Results that overwrite the data just read find its lines in the cache.
  const bool replaces = signature_->kind == OpKind::all_reduce && !items_.empty() && items_[0].in == items_[0].out;
  out_stores_ = replaces ? device::Stores::cached : result_stores(signature_->count * element_nbytes_);

  plan_.start({.kind = signature_->kind,
               .root = signature_->root,
               .rank = rank_,
               .world_size = world_size_,
               .element_nbytes = element_nbytes_,
               .slot_nbytes = memory_.slot_nbytes(),
               .lags = Lags::of_slots(memory_.slot_count())},
              items_);
  const std::uint32_t base = slot_ring_.base();
  while (plan_.next()) {
    if (plan_.copy_in().runs) copy_in(plan_.copy_in(), base + plan_.copy_in().step);
    if (plan_.reduce().runs) reduce(plan_.reduce(), base + plan_.reduce().step);
    if (plan_.copy_out().runs) copy_out(plan_.copy_out(), base + plan_.copy_out().step);
  }
  slot_ring_.advance(plan_.step_count());
}

void StagedPath::copy_in(const StagedPlan::Stage& stage, std::uint32_t index) {
  std::byte* const slot = plan_.fills_slot() ? slot_ring_.claim(index) : nullptr;
  for (const Action& action : stage.actions) {
    if (action.kind == Action::Kind::send)
      writer_.write(slot + action.slot, input(action), action.count * element_nbytes_);
    else
      copy_own(action);
  }
  slot_ring_.show(index);
}

void StagedPath::copy_own(const Action& action) {
  std::byte* const to = output(action, element_nbytes_);
  if (to != input(action)) device::copy(to, input(action), action.count * element_nbytes_, out_stores_);
}

void StagedPath::reduce(const StagedPlan::Stage& stage, std::uint32_t index) {
  if (reduces(signature_->kind)) liveness_.wait_for_peers(Stage::copied_in, index + 1);
  for (const Action& action : stage.actions) reduce(action, index);
  publish(memory_.own()[Stage::reduced], index + 1);
}

void StagedPath::reduce(const Action& action, std::uint32_t index) {
  for (int q = 0; q < world_size_; ++q)
    sources_[static_cast<std::size_t>(q)] = q == rank_ ? input(action) : memory_.slot(q, index) + action.slot;
  std::byte* const slot = memory_.slot(rank_, index) + action.slot;
  const bool keeps = action.to == Action::Memory::output, both = action.also_to == Action::Memory::slot;
  void* const targets[] = {keeps ? output(action, out_nbytes_) : slot, slot};
  if (both && writer_.stores() == device::Stores::streaming)
    return reduce_past_cache(targets[0], targets[1], action.count);
  device::reduce({.dst = {targets, both ? 2u : 1u},
                  .src = sources_,
                  .count = action.count,
                  .in = signature_->dtype,
                  .out = signature_->out_dtype,
                  .op = signature_->op,
                  .accumulate = signature_->accumulate,
                  .stores = both || !keeps ? writer_.stores() : out_stores_});
}

/// The result may overlap an input, which rules out non-temporal stores to it. So each block is reduced into the result
/// first and copied from there to the slot.
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

void StagedPath::copy_out(const StagedPlan::Stage& stage, std::uint32_t index) {
  if (plan_.reads_slots()) {
    if (signature_->kind == OpKind::broadcast || signature_->kind == OpKind::scatter)
      liveness_.wait(Stage::copied_in, signature_->root, index + 1);
    else
      liveness_.wait_for_peers(reduces(signature_->kind) ? Stage::reduced : Stage::copied_in, index + 1);
  }
  for (const Action& action : stage.actions) {
    if (action.kind == Action::Kind::recv)
      device::copy(output(action, element_nbytes_), memory_.slot(action.peer, index) + action.slot,
                   action.count * element_nbytes_, out_stores_);
    else
      copy_own(action);
  }
  publish(memory_.own()[Stage::copied_out], index + 1);
}

}  // namespace zcomm::coll
