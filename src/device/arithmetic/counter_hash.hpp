// Random bits of a counter: included once per instruction set, as device/convert_body.hpp.
//
// The hash is two multiply and xor-shift rounds on the counter, keyed by a 64-bit mix of a step (or seed) and a high
// part of the counter. Integer arithmetic only. Constants: Wellons' lowbias32, Steele's SplitMix64.
#pragma once

#include "device/convert_body.hpp"

namespace zcomm::device::ZC_ISA {
namespace {

struct RoundingKey {
  u32 first, second;
};

/// Optimizers: the key of a step's elements [high * 2^32, (high + 1) * 2^32). Codecs: of a seed's block `high`.
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

}  // namespace
}  // namespace zcomm::device::ZC_ISA
