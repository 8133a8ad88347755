// Moving to a CPU of one's own (coll/placement.hpp).
#include "coll/placement.hpp"

#include <sched.h>

namespace zcomm::coll {
namespace {

constexpr auto kRest = std::chrono::milliseconds(5);

}  // namespace

Placement::Placement(const HostMemory& memory)
    : memory_(memory), has_own_cpu_(memory.world_size() > 1 && memory.world_size() <= memory.cpu_count()) {}

void Placement::show() noexcept {
  if (has_own_cpu_) memory_.own().cpu.store(sched_getcpu(), std::memory_order_relaxed);
}

void Placement::make_room(int peer) noexcept {
  if (!has_own_cpu_) return;
  const int here = sched_getcpu();
  memory_.own().cpu.store(here, std::memory_order_relaxed);
  if (peer > memory_.rank()) return;
  if (here < 0 || memory_.block(peer).cpu.load(std::memory_order_relaxed) != here) return;
  const auto now = Clock::now();
  if (now < rests_until_) return;
  rests_until_ = now + kRest;
  cpu_set_t mine;
  if (sched_getaffinity(0, sizeof(mine), &mine) != 0) return;
  cpu_set_t others = mine;
  for (int rank = 0; rank < memory_.world_size(); ++rank) {
    const int cpu = memory_.block(rank).cpu.load(std::memory_order_relaxed);
    if (rank != memory_.rank() && cpu >= 0 && cpu < CPU_SETSIZE) CPU_CLR(cpu, &others);
  }
  if (CPU_COUNT(&others) == 0) return;
  if (sched_setaffinity(0, sizeof(others), &others) != 0) return;
  sched_setaffinity(0, sizeof(mine), &mine);
  show();
}

}  // namespace zcomm::coll
