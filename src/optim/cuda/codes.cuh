// Adam's step on 8-bit state on the device: a warp processes a block of 256 elements, which shares two scales.
//
// The new scales follow from all of a block's elements, so these are kept in registers, 8 a lane, until the warp has
// found the largest (two reductions of integers); then they are encoded. Same arithmetic as update_coded of
// optim/cpu/optim_body.hpp, element by element. 10 bytes read and 6 written per element with an f32 weight and
// gradient.
#pragma once

#include "optim/cuda/step.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "zcomm's kernels need compute capability 8.0 (Ampere) or later: see CMAKE_CUDA_ARCHITECTURES"
#endif

namespace zcomm::optim::cuda {
namespace {

constexpr unsigned kWarp = 32, kAllLanes = 0xffffffffu;
constexpr int kPerLane = static_cast<int>(kStateBlock / kWarp);

/// The warp's largest magnitudes, as bits.
__device__ __forceinline__ rules::Largest largest_of(const float* m, const float* v) {
  u32 first = 0, second = 0;
  for (int r = 0; r < kPerLane; ++r) {
    const u32 a = rules::bits_of(m[r]) & 0x7fffffffu, b = rules::bits_of(v[r]) & 0x7fffffffu;
    first = a > first ? a : first;
    second = b > second ? b : second;
  }
  return {__reduce_max_sync(kAllLanes, first), __reduce_max_sync(kAllLanes, second)};
}

/// Elements [begin, begin + 256) of the piece, or as many as there are, by the calling warp.
template <DType weight>
__device__ __forceinline__ void step_coded_block(const Piece& p, std::size_t begin, DType grad_dtype,
                                                 const AdamFactors& f) {
  const u32 lane = threadIdx.x % kWarp;
  const std::size_t n = p.count - begin < kStateBlock ? p.count - begin : kStateBlock;
  auto* first = static_cast<std::uint8_t*>(p.state[0]) + begin;
  auto* second = static_cast<std::uint8_t*>(p.state[1]) + begin;
  float* scales = p.scales + begin / kStateBlock * 2;
  const float first_scale = scales[0], second_scale = scales[1];
  const bool may_be_lost = __builtin_signbit(first_scale);
  SmallAdamFactors small = f.small;  // a scale multiplies the kept part
  small.first_keep *= __builtin_fabsf(first_scale);
  small.second_keep *= second_scale;
  float m[kPerLane] = {}, v[kPerLane] = {}, g[kPerLane] = {}, w[kPerLane] = {};
  const auto each = [lane, n](const auto& body) {
    for (int r = 0; r < kPerLane; ++r)
      if (const std::size_t k = lane + static_cast<u32>(r) * kWarp; k < n) body(r, k);
  };
  each([&](int r, std::size_t k) {  // all loads are issued before the first store, which they might alias
    const std::uint8_t a = first[k], b = second[k];
    const bool lost = may_be_lost && a == rules::kLost;
    m[r] = lost ? __builtin_nanf("") : rules::first_of(a);
    v[r] = lost ? __builtin_nanf("") : rules::second_of(b);
    get_grad<1>(&g[r], p.grad, grad_dtype, begin + k);
    get_weight<weight, 1>(&w[r], p, begin + k);
  });
  each([&](int r, std::size_t) { w[r] = SmallAdam::update(w[r], g[r], m[r], v[r], f.adamw, small); });
  each([&](int r, std::size_t k) { put_weight<weight, 1>(p, begin + k, &w[r]); });
  rules::Largest largest = largest_of(m, v);
  const bool finite = rules::finite(largest);
  bool lost[kPerLane] = {};
  if (!finite) {  // the same for all lanes
    for (int r = 0; r < kPerLane; ++r) {
      lost[r] = !rules::finite(m[r]) || !rules::finite(v[r]);
      if (lost[r]) m[r] = v[r] = 0.0f;
    }
    largest = largest_of(m, v);
  }
  const rules::Scales s = rules::scales_of(largest);
  const rules::CodeKey key = rules::code_key(f.step, p.index + begin);
  for (int r = 0; r < kPerLane; ++r) {
    const u32 k = lane + static_cast<u32>(r) * kWarp;
    if (k >= n) continue;
    const u32 chance = rules::code_chance(k, key);
    u32 code = rules::code_of_first(m[r], s.first_inverse, chance);
    if (!finite) code = lost[r] ? rules::kLost : (code & 127u) == 0 ? 0u : code;
    first[k] = static_cast<std::uint8_t>(code);
    second[k] = static_cast<std::uint8_t>(rules::code_of_second(v[r], s.second_inverse, chance));
  }
  if (lane != 0) return;  // all lanes have read the scales, because they have synchronized since
  scales[0] = finite ? s.first : -s.first;
  scales[1] = s.second;
}

template <DType weight>
__device__ void step_coded_piece(const Piece& p, DType grad_dtype, const AdamFactors& f) {
  for (std::size_t begin = threadIdx.x / kWarp * kStateBlock; begin < p.count; begin += kThreads / kWarp * kStateBlock)
    step_coded_block<weight>(p, begin, grad_dtype, f);
}

template <class Rule, DType weight, DType state>
__device__ void step_any_piece(const Piece& p, DType grad_dtype, const typename Rule::Factors& f) {
  if constexpr (state == DType::uint8) {
    step_coded_piece<weight>(p, grad_dtype, f);
  } else {
    step_piece<Rule, weight, state>(p, grad_dtype, f);
  }
}

}  // namespace
}  // namespace zcomm::optim::cuda
