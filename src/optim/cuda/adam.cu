// Adam's step of many parameters on the device: two launches for up to kMostItems of them.
//
// The first, with one thread per item, counts its step and computes its factors, all in device memory. So the host
// never waits for a found infinity, a scale or a learning rate that the device has computed, and a captured graph
// continues to count when it is replayed. Items are passed as the second launch's arguments, because a table would have
// to be kept and copied.
#include <type_traits>

#include "optim/cuda/codes.cuh"

namespace zcomm::optim::cuda {
namespace {

constexpr std::size_t kMostCounters = 384, kMostItems = 29;  // that fit 4 KiB of arguments

struct AdvanceLaunch {
  float* counters[kMostCounters];
  unsigned count;
  StreamAdam options;
  OnDevice<AdamFactors>* factors;
};
static_assert(sizeof(AdvanceLaunch) <= 4096);

__global__ void __launch_bounds__(kThreads) advance_kernel(const __grid_constant__ AdvanceLaunch args) {
  const StreamAdam& o = args.options;
  for (unsigned i = threadIdx.x; i < args.count; i += kThreads) {
    OnDevice<AdamFactors>& out = args.factors[i];
    out.skip = o.found_inf != nullptr && *o.found_inf != 0.0f ? 1 : 0;
    if (out.skip != 0) continue;
    const float counter = *args.counters[i];
    *args.counters[i] = counter + 1.0f;
    const double lr = o.lr == nullptr ? o.params.lr : static_cast<double>(*o.lr);
    const double divisor = o.grad_scale == nullptr ? 1.0 : static_cast<double>(*o.grad_scale);
    const float scale = static_cast<float>(o.clip / divisor);
    out.factors = adam_factors(o.params, lr, o.params.maximize ? -scale : scale, static_cast<u64>(counter) + 1);
  }
}

struct AdamLaunch {
  struct Item {
    OptimShard shard;
    Chunks chunks;
    std::size_t first_chunk;
  } items[kMostItems];
  const OnDevice<AdamFactors>* factors;
  std::size_t chunks;
  unsigned count;
};
static_assert(sizeof(AdamLaunch) <= 4096);

/// A block of threads processes chunks of all items; all of its threads find the item by the same search among the
/// arguments: 5 loads from the constant cache.
template <DType weight, DType state>
__global__ void __launch_bounds__(kThreads) adam_kernel(const __grid_constant__ AdamLaunch args) {
  for (std::size_t chunk = blockIdx.x; chunk < args.chunks; chunk += gridDim.x) {
    unsigned low = 0, high = args.count;
    while (high - low > 1) {
      const unsigned middle = (low + high) / 2;
      (args.items[middle].first_chunk <= chunk ? low : high) = middle;
    }
    const AdamLaunch::Item& item = args.items[low];
    if (args.factors[low].skip != 0) continue;
    const AdamFactors f = args.factors[low].factors;
    const Piece piece = piece_of<weight, state, 2>(item.shard, item.chunks, chunk - item.first_chunk);
    using Rule = std::conditional_t<state == DType::float32, Adam, SmallAdam>;
    step_any_piece<Rule, weight, state>(piece, item.shard.grad_dtype, f);
  }
}

template <DType weight, DType state>
void launch_as(const AdamLaunch& args, cudaStream_t stream) {
  const std::size_t most = device::cuda::kMaxBlocks, blocks = args.chunks < most ? args.chunks : most;
  if (blocks > 0) device::cuda::launch(adam_kernel<weight, state>, static_cast<unsigned>(blocks), stream, args);
}

template <DType weight>
void launch_weight(const AdamLaunch& args, DType state, cudaStream_t stream) {
  switch (state) {
    case DType::bfloat16:
      return launch_as<weight, DType::bfloat16>(args, stream);
    case DType::uint8:
      return launch_as<weight, DType::uint8>(args, stream);
    default:
      return launch_as<weight, DType::float32>(args, stream);
  }
}

void launch_items(const AdamLaunch& args, cudaStream_t stream) {
  const OptimShard& shard = args.items[0].shard;
  switch (shard.weight_dtype) {
    case DType::bfloat16:
      return launch_weight<DType::bfloat16>(args, shard.state_dtype, stream);
    case DType::float16:
      return launch_weight<DType::float16>(args, shard.state_dtype, stream);
    default:
      return launch_weight<DType::float32>(args, shard.state_dtype, stream);
  }
}

bool same_kernel(const OptimShard& a, const OptimShard& b) {
  return a.weight_dtype == b.weight_dtype && a.state_dtype == b.state_dtype;
}

}  // namespace

void launch_advance(std::span<const StreamAdamItem> items, const StreamAdam& options, OnDevice<AdamFactors>* factors,
                    std::uintptr_t native) {
  for (std::size_t begin = 0; begin < items.size(); begin += kMostCounters) {
    AdvanceLaunch args{{}, 0, options, factors + begin};
    for (; args.count < kMostCounters && begin + args.count < items.size(); ++args.count)
      args.counters[args.count] = items[begin + args.count].counter;
    device::cuda::launch(advance_kernel, 1, reinterpret_cast<cudaStream_t>(native), args);
  }
}

void launch_adam(std::span<const StreamAdamItem> items, const OnDevice<AdamFactors>* factors, std::uintptr_t native) {
  for (std::size_t i = 0; i < items.size();) {
    AdamLaunch args{};
    args.factors = factors + i;
    for (; args.count < kMostItems && i < items.size(); ++args.count, ++i) {
      const OptimShard& shard = items[i].shard;
      if (args.count > 0 && !same_kernel(shard, args.items[0].shard)) break;
      args.items[args.count] = {shard, chunks_of(shard), args.chunks};
      args.chunks += args.items[args.count].chunks.count;
    }
    launch_items(args, reinterpret_cast<cudaStream_t>(native));
  }
}

}  // namespace zcomm::optim::cuda
