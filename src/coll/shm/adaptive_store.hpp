// Stores for results, and (AdaptiveStore) for data that peers will read and this rank will soon overwrite: through the
// cache, or past it.
//
// [Note: far caches] If ranks share a last-level cache, a slot written through it never leaves it: nothing is faster.
// If they do not (several core complexes or sockets), the writer must first fetch each line back from the peer that has
// read it: 2 GB/s, while non-temporal stores reach 40. The topology that a container or a virtual machine reports is
// unreliable, and threads move. So the writer measures its rate, and writes past the cache while that is faster. Thread
// rule: used by one thread at a time.
#pragma once

#include <cstddef>

#include "device/kernels.hpp"

namespace zcomm::coll {

class AdaptiveStore {
 public:
  /// memcpy into a slot; blocks of 32 KiB and more are timed and decide on the stores of the next ones.
  void write(void* slot, const void* from, std::size_t nbytes);
  device::Stores stores() const { return streams_ ? device::Stores::streaming : device::Stores::cached; }

  /// The measurement of write(): `nbytes` took `seconds` with the present stores.
  void learn(std::size_t nbytes, double seconds);

 private:
  bool streams_ = false;
  int slow_ = 0;           // consecutive slow writes of the present kind
  int left_ = 0;           // writes until the other kind is tried
  double cached_bps_ = 0;  // the cache's rate when it was abandoned
};

/// The stores for results, given the bytes of all ranks' parts. Results too large for the cache are written past it: a
/// line that is only written need not be read first.
device::Stores result_stores(std::size_t nbytes);

}  // namespace zcomm::coll
