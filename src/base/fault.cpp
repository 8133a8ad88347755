// Armed faults (base/fault.hpp).
#include "base/fault.hpp"

namespace zcomm {
namespace {
std::atomic<void (*)()> armed_action{nullptr};
}

void fault::hit() noexcept {
  if (points_left.fetch_sub(1) != 1) return;
  if (auto* const action = armed_action.load()) action();
}

void arm_fault(int n, void (*action)()) noexcept {
  armed_action = action;
  fault::points_left = n;
}

}  // namespace zcomm
