// Choosing between cached and non-temporal stores by their rate (coll/shm/adaptive_store.hpp).
#include "coll/shm/adaptive_store.hpp"

#include <cstring>
#include <ctime>

namespace zcomm::coll {
namespace {

constexpr std::size_t kTimedFrom = 32 << 10;  // shorter ones would measure the clock
constexpr double kSlowBps = 4e9;              // no shared cache is slower, few far ones are faster
constexpr int kSlowInRow = 3;                 // one slow write may be one that was interrupted
constexpr int kStay = 256;                    // writes until the other kind of store is tried: costs 1 or 2 % of them

/// CPU time of this thread, because ranks that share a CPU interrupt each other, which says nothing about caches.
double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

void AdaptiveStore::write(void* slot, const void* from, std::size_t nbytes) {
  if (nbytes == 0) return;
  if (nbytes < kTimedFrom) {
    std::memcpy(slot, from, nbytes);
    return;
  }
  const double start = cpu_seconds();
  if (streams_)
    device::copy(slot, from, nbytes, device::Stores::streaming);
  else
    std::memcpy(slot, from, nbytes);
  learn(nbytes, cpu_seconds() - start);
}

void AdaptiveStore::learn(std::size_t nbytes, double seconds) {
  const double bps = static_cast<double>(nbytes) / seconds;
  if (left_ > 0) --left_;
  if (streams_) {
    // The whole machine may be slow, not only the path through the cache.
    slow_ = bps > 2 * cached_bps_ ? 0 : slow_ + 1;
    if (slow_ == kSlowInRow) {
      *this = {};
      left_ = kStay;
    } else if (left_ == 0) {
      streams_ = false;
      slow_ = kSlowInRow - 1;  // one slow write is enough now
    }
  } else if (left_ == 0) {
    slow_ = bps < kSlowBps ? slow_ + 1 : 0;
    if (slow_ < kSlowInRow) return;
    streams_ = true;
    slow_ = 0;
    cached_bps_ = bps;
    left_ = kStay;
  }
}

device::Stores result_stores(std::size_t nbytes) {
  constexpr std::size_t kStreamFrom = 4 << 20;  // more than a core's own caches
  return nbytes >= kStreamFrom ? device::Stores::streaming : device::Stores::cached;
}

}  // namespace zcomm::coll
