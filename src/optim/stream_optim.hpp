// Optimizer steps and block squares on a device's stream, with the bits of the CPU's steps and add_squares.
//
// Memory is the device's; arguments are checked and copied before a call returns. Thread rule and errors: as in
// device/stream_kernels.hpp; InvalidArgument as the optimizers' own steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "device/stream_kernels.hpp"
#include "optim/optim_table.hpp"
#include "zcomm/adagrad.hpp"
#include "zcomm/adam.hpp"
#include "zcomm/exact_sum.hpp"
#include "zcomm/lion.hpp"
#include "zcomm/sgd.hpp"

namespace zcomm::optim {

/// A step's factors that a kernel reads from device memory: before each replay of a graph that has captured the step, a
/// copy supplies new ones.
template <class Factors>
struct OnDevice {
  Factors factors;
  std::uint32_t skip = 0;  ///< not 0: the step changes nothing
};
OnDevice<AdamFactors> factors_of(const AdamParams& params);
OnDevice<LionFactors> factors_of(const LionParams& params);

void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const AdamParams& params);
void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const LionParams& params);
void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const SgdParams& params);
void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const AdagradParams& params);
void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const OnDevice<AdamFactors>* on_device);
void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const OnDevice<LionFactors>* on_device);

/// A parameter of FusedAdam. counter: its steps so far, one f32 in device memory, incremented by each step.
struct StreamAdamItem {
  OptimShard shard;
  float* counter;
};

/// Settings shared by a step's items. params.step and params.grad_scale are not read. The others are single numbers in
/// device memory, or null: lr replaces params.lr; grad_scale: gradients are divided by it; found_inf: if it is not 0,
/// no item is changed and no step counted.
struct StreamAdam {
  AdamParams params;
  double clip = 1.0;  ///< gradients are multiplied by it
  const float* lr = nullptr;
  const float* grad_scale = nullptr;
  const float* found_inf = nullptr;
};

/// One step of all items, equal to adam_step with step *counter + 1 for each. factors: device memory for items.size()
/// of them, not read by the host. Items may differ in their types; adjacent equal ones share a launch.
void stream_adam(device::StreamKernels& kernels, std::span<const StreamAdamItem> items, const StreamAdam& options,
                 OnDevice<AdamFactors>* factors);

/// sums[b] = the squares of grad[64 b, 64 b + 64), as add_squares adds them, for (count + 63) / 64 blocks.
void stream_squares(device::StreamKernels& kernels, double* sums, const void* grad, DType dtype, std::size_t count);
/// words: of an ExactSum in device memory; += the squares of grad, as add_squares adds them. They are not carried: up
/// to 2^29 blocks may be added to words of zeros before add_words takes them.
void stream_norm(device::StreamKernels& kernels, std::int64_t* words, const void* grad, DType dtype, std::size_t count);
void add_words(ExactSum& sum, std::span<const std::int64_t, ExactSum::kWords> words);

/// On host memory: the same, and their sum (add_squares is both).
void block_squares(double* sums, const void* grad, DType dtype, std::size_t count);
void add_block_sums(ExactSum& sum, std::span<const double> sums);

}  // namespace zcomm::optim
