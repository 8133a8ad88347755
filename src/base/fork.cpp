// Counting forks (base/fork.hpp).
#include "base/fork.hpp"

#include <pthread.h>

#include <atomic>

namespace zcomm {
namespace {

std::atomic<int> generation{0};
const int registered = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

int fork_generation() noexcept {
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace zcomm
