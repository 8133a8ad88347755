// The pipeline over device slots (coll/cuda/ipc_staged.hpp).
#include "coll/cuda/ipc_staged.hpp"

#include <algorithm>

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
  plan_.start({.kind = signature_->kind,
               .root = signature_->root,
               .rank = rank_,
               .world_size = world_size_,
               .element_nbytes = element_nbytes_,
               .slot_nbytes = slots_.slot_nbytes(),
               .lags = Lags::of_rounds(signature_->kind)},
              items_);
  while (plan_.next()) {
    for (const auto* stage : {&plan_.copy_in(), &plan_.reduce(), &plan_.copy_out()}) run(*stage);
    rounds_.barrier();
  }
}

void DeviceStaged::copy(std::byte* to, const std::byte* from, std::size_t nbytes) {
  if (to != from && nbytes != 0) rounds_.stream().copy(to, from, nbytes);
}

void DeviceStaged::run(const StagedPlan::Stage& stage) {
  for (const Action& action : stage.actions) {
    const std::size_t nbytes = action.count * element_nbytes_;
    const std::byte* const input = items_[action.buffer].in + action.in * element_nbytes_;
    std::byte* const output = items_[action.buffer].out + action.out * element_nbytes_;
    switch (action.kind) {
      case Action::Kind::copy:
        copy(output, input, nbytes);
        break;
      case Action::Kind::send:
        copy(slots_.slot(rank_, stage.step) + action.slot, input, nbytes);
        break;
      case Action::Kind::recv:
        copy(output, slots_.slot(action.peer, stage.step) + action.slot, nbytes);
        break;
      case Action::Kind::reduce:
        reduce(action, stage.step);
        break;
    }
  }
}

void DeviceStaged::reduce(const Action& action, std::uint32_t step) {
  const Item& item = items_[action.buffer];
  for (int q = 0; q < world_size_; ++q)
    sources_[static_cast<std::size_t>(q)] =
        q == rank_ ? item.in + action.in * element_nbytes_ : slots_.slot(q, step) + action.slot;
  const bool keeps = action.to == Action::Memory::output, both = action.also_to == Action::Memory::slot;
  // A world of one has no slots.
  std::byte* const slot = both || !keeps ? slots_.slot(rank_, step) + action.slot : nullptr;
  void* const targets[] = {keeps ? item.out + action.out * out_nbytes_ : slot, slot};
  rounds_.stream().kernels().reduce({.dst = {targets, both ? 2u : 1u},
                                     .src = sources_,
                                     .count = action.count,
                                     .in = signature_->dtype,
                                     .out = signature_->out_dtype,
                                     .op = signature_->op,
                                     .accumulate = signature_->accumulate,
                                     .remote = remote_});
}

}  // namespace zcomm::coll
