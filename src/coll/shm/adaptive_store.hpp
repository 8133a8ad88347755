// How a rank writes results, and (AdaptiveStore) what its peers will read, and soon write over: through the cache, or
// past it.
//
// [Note: far caches] Where ranks share a last-level cache, a slot that is written through it never leaves it: nothing
// is faster. Where they do not (several core complexes or sockets), the writer must first take each line back from the
// peer that has read it: 2 GB/s where non-temporal stores go at 40. No topology that a container or a virtual machine
// shows can be trusted, and threads move: so the writer looks at the rate it gets, and writes past the cache while that
// is faster. Thread rule: used by one thread at a time.
#pragma once

#include <cstddef>

#include "device/kernels.hpp"

namespace zcomm::coll {

class AdaptiveStore {
 public:
  /// memcpy into a slot; blocks of 32 KiB and more are timed and decide on the stores of the next ones.
  void write(void* slot, const void* from, std::size_t nbytes);
  device::Stores stores() const { return streams_ ? device::Stores::streaming : device::Stores::cached; }

  /// What write() learns: `nbytes` took `seconds` with the present stores.
  void learn(std::size_t nbytes, double seconds);

 private:
  bool streams_ = false;
  int slow_ = 0;           // disappointing writes of the present way, one after the other
  int left_ = 0;           // writes until the other way is tried
  double cached_bps_ = 0;  // what the cache gave when it was given up
};

/// How results are written, given the bytes of all ranks' parts. What does not stay in the cache is written past it: a
/// line that is only written need not be read first.
device::Stores result_stores(std::size_t nbytes);

}  // namespace zcomm::coll
