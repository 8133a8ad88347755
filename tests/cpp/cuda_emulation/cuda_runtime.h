// What src/**/*.cu needs of CUDA, for the host's compiler: the same sources, launches included, run without a GPU.
//
// Found instead of CUDA's header by files that have this folder on their include path. Whatever a kernel uses beyond
// this is added here, with the documented meaning (CUDA C++ Programming Guide) and no more.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "cuda_emulation/grid.hpp"

#define __host__
#define __device__
#define __shared__ static thread_local  // blocks of a thread run one after another
#define __global__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct EmulatedStream;
using cudaStream_t = EmulatedStream*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };

struct cudaLaunchConfig_t {
  ::zcomm::emulation::Index gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

/// At once. Arguments are copied, as they are into a launch. A limit that is passed ends the program: the launch would
/// fail on a GPU.
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  static_assert((sizeof(Params) + ... + 0) <= 4096, "kernel arguments are at most 4 KiB");
  const std::tuple<std::decay_t<Params>...> copies(args...);
  const auto &grid = config->gridDim, &block = config->blockDim;
  if (grid.x == 0 || block.x == 0 || block.x > 1024 || grid.x > 0x7fffffffu) return cudaErrorInvalidConfiguration;
  ::zcomm::emulation::run_grid(grid, block, [&] { std::apply(kernel, copies); });
  return cudaSuccess;
}

// -- Bits and conversions

inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __double2float_rz(double x) {
  const float nearest = static_cast<float>(x);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}

// -- Warps

template <class T>
T emulated_shuffle(unsigned mask, T value, int from) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const std::uint64_t* all = ::zcomm::emulation::exchange(mask, bits);
  std::memcpy(&value, all + from, sizeof(T));
  return value;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return emulated_shuffle(mask, value, static_cast<int>(threadIdx.x % 32) ^ lane_mask);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = static_cast<int>(threadIdx.x % 32), to = lane + static_cast<int>(delta);
  return emulated_shuffle(mask, value, to / width == lane / width ? to : lane);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  const std::uint64_t* all = ::zcomm::emulation::exchange(mask, value);
  std::uint64_t most = 0;
  for (int lane = 0; lane < 32; ++lane) most = all[lane] > most ? all[lane] : most;  // not in the mask: 0
  return static_cast<unsigned>(most);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint64_t* all = ::zcomm::emulation::exchange(mask, predicate != 0 ? 1 : 0);
  unsigned word = 0;
  for (unsigned lane = 0; lane < 32; ++lane) word |= static_cast<unsigned>(all[lane]) << lane;  // not in the mask: 0
  return word;
}
inline int __any_sync(unsigned mask, int predicate) { return __reduce_max_sync(mask, predicate != 0 ? 1u : 0u) != 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { ::zcomm::emulation::exchange(mask, 0); }
inline void __syncthreads() { ::zcomm::emulation::meet_block(); }

inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  const unsigned long long old = *to;
  *to = old + value;
  return old;
}
