// The halves of a split master: included by optim/cpu/optim_body.hpp once per instruction set.
//
// See [Note: split master] in zcomm/optim_shard.hpp.
#pragma once

#include "device/convert_body.hpp"

namespace zcomm::optim::ZC_ISA {
namespace {

using namespace device::ZC_ISA;
using std::int16_t;

/// If the sum is NaN while the weight is a number, the program wrote the weight, and `lo` belongs to an older one.
ZC_INLINE float join_one(u16 weight, int16_t lo) {
  const u32 high = static_cast<u32>(weight) << 16;
  const u32 bits = high + static_cast<u32>(static_cast<std::int32_t>(lo));
  return float_of((bits & 0x7fffffffu) > 0x7f800000u ? high : bits);
}

ZC_INLINE u16 high_half(u32 bits) {
  const u32 quiet = (bits >> 16) | 0x40u;
  return static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : (bits + 0x8000u) >> 16);
}

/// bits(master) - (weight << 16) is the low half, read as a signed number.
ZC_INLINE int16_t low_half(u32 bits) {
  const u32 low = (bits & 0x7fffffffu) > 0x7f800000u ? 0u : bits;
  return static_cast<int16_t>(static_cast<u16>(low));
}

inline void split(u16* weight, int16_t* lo, const float* master, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    const u32 bits = bits_of(master[i]);
    weight[i] = high_half(bits);
    lo[i] = low_half(bits);
  }
}

inline void join(float* master, const u16* weight, const int16_t* lo, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) master[i] = join_one(weight[i], lo[i]);
}

}  // namespace
}  // namespace zcomm::optim::ZC_ISA
