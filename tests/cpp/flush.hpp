// FlushSubnormals: for its lifetime this thread takes subnormal numbers for zero, as torch.set_flush_denormal(True) has
// it.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace zcomm::test {

class FlushSubnormals {
 public:
#if defined(__SSE2__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{1} << 24)); }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0})); }
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}
#endif
};

/// Half of the smallest normal number as this thread computes it: 0 if it flushes subnormals.
inline float half_of_the_smallest() {
  volatile float smallest = 1.17549435e-38f;
  return smallest * 0.5f;
}

}  // namespace zcomm::test
