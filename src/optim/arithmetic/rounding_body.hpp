// Stochastic rounding f32 -> bf16 by a counter's hash: included by optim/cpu/optim_body.hpp once per instruction set.
//
// See [Note: stochastic rounding] in zcomm/optim_shard.hpp. Integer arithmetic only. The hash is two multiply and
// xor-shift rounds on the counter, keyed by a 64-bit mix of the step (constants: Wellons' lowbias32, Steele's
// SplitMix64).
#pragma once

#include "device/convert_body.hpp"

namespace zcomm::optim::ZC_ISA {
namespace {

using namespace device::ZC_ISA;

struct RoundingKey {
  u32 first, second;
};

/// The key of a step's elements [high * 2^32, (high + 1) * 2^32).
ZC_INLINE RoundingKey rounding_key(u64 step, u64 high) {
  u64 x = step * 0x9e3779b97f4a7c15u + high * 0xd1b54a32d192ed03u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return {static_cast<u32>(x), static_cast<u32>(x >> 32)};
}

/// 32 random bits of element `index` (modulo 2^32).
ZC_INLINE u32 random_bits(u32 index, RoundingKey key) {
  u32 x = index ^ key.first;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) + key.second;
  x = x * 0x846ca68bu;
  return x ^ (x >> 16);
}

/// Up with probability (low 16 bits of x) / 2^16. chance: 16 random bits.
ZC_INLINE u16 stochastic_bf16(float x, u32 chance) {
  const u32 bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const u32 special = (bits >> 16) | (magnitude > 0x7f800000u ? 0x40u : 0u);
  const u32 rounded = (bits + chance) >> 16;
  return static_cast<u16>(magnitude >= 0x7f800000u ? special : rounded);
}

}  // namespace
}  // namespace zcomm::optim::ZC_ISA
