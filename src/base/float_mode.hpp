// DefaultFloatMode: for its lifetime this thread rounds to nearest and keeps subnormal numbers.
//
// A program may have set its own thread otherwise (torch.set_flush_denormal), and threads inherit the mode of the
// thread that starts them; results must not depend on which thread computed them. Costs a few cycles if no mode was
// changed.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace zcomm {

#if defined(__SSE2__)

class DefaultFloatMode {
 public:
  DefaultFloatMode() : before_(_mm_getcsr()) {
    if (differs()) _mm_setcsr(kDefault);
  }
  ~DefaultFloatMode() {
    if (differs()) _mm_setcsr(before_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  static constexpr unsigned kDefault = 0x1f80, kStatus = 0x3f;  // all exceptions masked; sticky status flags
  bool differs() const { return (before_ & ~kStatus) != kDefault; }
  const unsigned before_;
};

#elif defined(__aarch64__)

class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if (before_ != 0) asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~DefaultFloatMode() {
    if (before_ != 0) asm volatile("msr fpcr, %0" : : "r"(before_));
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::uint64_t before_;
};

#else

class DefaultFloatMode {
 public:
  DefaultFloatMode() {
  }  // NOLINT(modernize-use-equals-default): not trivial, so that compilers do not warn of an unused variable
  ~DefaultFloatMode() {}  // NOLINT(modernize-use-equals-default)
};

#endif

}  // namespace zcomm
