// Messenger: send and recv between two ranks, beside the collectives and in no order with them.
//
// Messages of one pair and tag match in call order. Several sends and receives progress at once, so that two ranks
// which first send to and then receive from each other never deadlock. Arguments have been checked by the communicator.
// Thread rule: free-threaded.
#pragma once

#include <cstddef>
#include <span>

#include "zcomm/communicator.hpp"

namespace zcomm::coll {

/// As many messages of one kind in flight take no memory. How many there are at once is a matter of timing, so lists
/// and pools grow by so many at once, and do not find out in step 1000.
constexpr std::size_t kWarm = 16;

class Messenger {
 public:
  virtual ~Messenger() = default;
  virtual Work send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call) = 0;
  /// src -1: any rank; `*source` gets its rank.
  virtual Work recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call, int* source) = 0;
  /// Ends what is pending with Error; joins its thread.
  virtual void close() noexcept = 0;
};

}  // namespace zcomm::coll
