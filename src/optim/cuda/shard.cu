// The step of one shard (a flat buffer with its state in tiles) on the device.
#include "optim/cuda/codes.cuh"

namespace zcomm::optim::cuda {
namespace {

/// With a momentum buffer, which is not touched while momentum is 0.
struct BufferedSgd {
  using Factors = SgdFactors;
  static constexpr int arrays = 1;
  static __device__ __forceinline__ float update(float w, float g, float& buffer, float& none, const Factors& f) {
    if (!f.momentum) return rules::PlainSgd::update(w, g, buffer, none, f);
    return f.nesterov ? rules::MomentumSgd<true>::update(w, g, buffer, none, f)
                      : rules::MomentumSgd<false>::update(w, g, buffer, none, f);
  }
};

template <class Factors>
struct ShardLaunch {
  OptimShard shard;
  Chunks chunks;
  Factors factors;
  const OnDevice<Factors>* on_device;
};

template <class Rule, DType weight, DType state>
__global__ void __launch_bounds__(kThreads)
    shard_kernel(const __grid_constant__ ShardLaunch<typename Rule::Factors> args) {
  const bool from_device = args.on_device != nullptr;
  if (from_device && args.on_device->skip != 0) return;
  const typename Rule::Factors f = from_device ? args.on_device->factors : args.factors;
  for (std::size_t chunk = blockIdx.x; chunk < args.chunks.count; chunk += gridDim.x) {
    const Piece piece = piece_of<weight, state, Rule::arrays>(args.shard, args.chunks, chunk);
    step_any_piece<Rule, weight, state>(piece, args.shard.grad_dtype, f);
  }
}

template <class Rule, DType weight, DType state>
void launch_as(const ShardLaunch<typename Rule::Factors>& args, cudaStream_t stream) {
  const std::size_t most = device::cuda::kMaxBlocks, blocks = args.chunks.count < most ? args.chunks.count : most;
  if (blocks > 0) device::cuda::launch(shard_kernel<Rule, weight, state>, static_cast<unsigned>(blocks), stream, args);
}

template <class Rule, DType state>
void launch_state(const ShardLaunch<typename Rule::Factors>& args, cudaStream_t stream) {
  switch (args.shard.weight_dtype) {
    case DType::bfloat16:
      return launch_as<Rule, DType::bfloat16, state>(args, stream);
    case DType::float16:
      return launch_as<Rule, DType::float16, state>(args, stream);
    default:
      return launch_as<Rule, DType::float32, state>(args, stream);
  }
}

}  // namespace

void launch_step(const OptimShard& shard, int, const AdamFactors& factors, const OnDevice<AdamFactors>* on_device,
                 std::uintptr_t native) {
  const auto stream = reinterpret_cast<cudaStream_t>(native);
  const ShardLaunch<AdamFactors> args{shard, chunks_of(shard), factors, on_device};
  switch (shard.state_dtype) {
    case DType::bfloat16:
      return launch_state<SmallAdam, DType::bfloat16>(args, stream);
    case DType::uint8:
      return launch_state<SmallAdam, DType::uint8>(args, stream);
    default:
      return launch_state<Adam, DType::float32>(args, stream);
  }
}

void launch_step(const OptimShard& shard, int, const LionFactors& factors, const OnDevice<LionFactors>* on_device,
                 std::uintptr_t native) {
  launch_state<rules::Lion, DType::float32>({shard, chunks_of(shard), factors, on_device},
                                            reinterpret_cast<cudaStream_t>(native));
}

void launch_step(const OptimShard& shard, int arrays, const SgdFactors& factors, const OnDevice<SgdFactors>* on_device,
                 std::uintptr_t native) {
  const auto stream = reinterpret_cast<cudaStream_t>(native);
  const ShardLaunch<SgdFactors> args{shard, chunks_of(shard), factors, on_device};
  return arrays == 0 ? launch_state<rules::PlainSgd, DType::float32>(args, stream)
                     : launch_state<BufferedSgd, DType::float32>(args, stream);
}

void launch_step(const OptimShard& shard, int, const AdagradFactors& factors, const OnDevice<AdagradFactors>* on_device,
                 std::uintptr_t native) {
  launch_state<rules::Adagrad, DType::float32>({shard, chunks_of(shard), factors, on_device},
                                               reinterpret_cast<cudaStream_t>(native));
}

}  // namespace zcomm::optim::cuda
