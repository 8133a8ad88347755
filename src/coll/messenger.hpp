// Messenger: send and recv between two ranks, beside the collectives and in no order with them.
//
// Messages of one pair and tag match in call order. Several sends and receives progress at once, so that two ranks
// which first send to and then receive from each other never deadlock. Arguments have been checked by the communicator.
// Thread rule: free-threaded.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>

#include "zcomm/communicator.hpp"

namespace zcomm::coll {

/// As many messages of one kind in flight take no memory. How many there are at once is a matter of timing, so lists
/// and pools grow by so many at once, and do not find out in step 1000.
constexpr std::size_t kWarm = 16;

/// Call::element, cut to fit, as the two sides of a message compare it.
struct ElementName {
  char text[24] = {};

  ElementName() = default;
  explicit ElementName(const char* name) { std::memcpy(text, name, std::min(std::strlen(name), sizeof(text) - 1)); }
  bool operator==(const ElementName&) const = default;
};

/// "float32", or "uint8 (complex64)".
inline std::string element_of(DType dtype, const ElementName& name) {
  std::string all(name_of(dtype));
  if (name.text[0] != '\0') all.append(" (").append(name.text).append(")");
  return all;
}

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
