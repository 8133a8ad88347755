// Launchers of the CUDA optimizer kernels; no CUDA types, so that a build without CUDA has a twin (no_cuda_optim.cpp).
//
// Arguments are checked by optim/stream_optim.cpp and passed by value; no launcher allocates or waits, so a graph can
// capture every launch. Asynchronous on `stream`, a cudaStream_t of the current device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "optim/stream_optim.hpp"

namespace zcomm::optim::cuda {

/// arrays: of the shard's state. on_device: used in place of `factors`, if not null.
void launch_step(const OptimShard& shard, int arrays, const AdamFactors& factors,
                 const OnDevice<AdamFactors>* on_device, std::uintptr_t stream);
void launch_step(const OptimShard& shard, int arrays, const LionFactors& factors,
                 const OnDevice<LionFactors>* on_device, std::uintptr_t stream);
void launch_step(const OptimShard& shard, int arrays, const SgdFactors& factors, const OnDevice<SgdFactors>* on_device,
                 std::uintptr_t stream);
void launch_step(const OptimShard& shard, int arrays, const AdagradFactors& factors,
                 const OnDevice<AdagradFactors>* on_device, std::uintptr_t stream);

/// Increments each item's counter and writes its factors to factors[i], or only `skip` if found_inf is not 0.
void launch_advance(std::span<const StreamAdamItem> items, const StreamAdam& options, OnDevice<AdamFactors>* factors,
                    std::uintptr_t stream);
/// Runs the steps with those factors.
void launch_adam(std::span<const StreamAdamItem> items, const OnDevice<AdamFactors>* factors, std::uintptr_t stream);

void launch_squares(double* sums, const void* grad, DType dtype, std::size_t count, std::uintptr_t stream);
void launch_norm(std::int64_t* words, const void* grad, DType dtype, std::size_t count, std::uintptr_t stream);

}  // namespace zcomm::optim::cuda
