// The interrupt check of the program (base/interrupt.hpp).
#include "base/interrupt.hpp"

#include <atomic>

namespace zcomm {
namespace {
std::atomic<void (*)()> interrupt_check{nullptr};
}

void set_interrupt_check(void (*check)()) { interrupt_check = check; }

void check_interrupt() {
  if (auto* const check = interrupt_check.load(std::memory_order_relaxed)) check();
}

}  // namespace zcomm
