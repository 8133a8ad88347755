// Fault points: places where a test makes this process fail.
//
// Each step that other ranks can see passes fault_point() just before it becomes visible. A test arms the n-th one from
// now; nothing is armed otherwise, and passing costs one relaxed load.
// Thread rule: free-threaded.
#pragma once

#include <atomic>

namespace zcomm {

namespace fault {
inline std::atomic<int> points_left{0};  ///< 0: nothing is armed
void hit() noexcept;
}  // namespace fault

/// Tests only: `action` runs at the n-th fault point from now (n >= 1), on the thread that passes it; n = 0 disarms.
void arm_fault(int n, void (*action)()) noexcept;

inline void fault_point() noexcept {
  if (fault::points_left.load(std::memory_order_relaxed) > 0) fault::hit();
}

}  // namespace zcomm
