// Stochastic rounding f32 -> bf16 by a counter's hash: included by optim/cpu/optim_body.hpp once per instruction set.
//
// See [Note: stochastic rounding] in zcomm/optim_shard.hpp. Integer arithmetic only.
#pragma once

#include "device/arithmetic/counter_hash.hpp"

namespace zcomm::optim::ZC_ISA {
namespace {

using namespace device::ZC_ISA;

/// Up with probability (low 16 bits of x) / 2^16. chance: 16 random bits.
ZC_INLINE u16 stochastic_bf16(float x, u32 chance) {
  const u32 bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const u32 special = (bits >> 16) | (magnitude > 0x7f800000u ? 0x40u : 0u);
  const u32 rounded = (bits + chance) >> 16;
  return static_cast<u16>(magnitude >= 0x7f800000u ? special : rounded);
}

}  // namespace
}  // namespace zcomm::optim::ZC_ISA
