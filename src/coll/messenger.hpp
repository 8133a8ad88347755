// Messenger: send and recv between two ranks, concurrent with the collectives and not ordered with them.
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

/// That many messages of one kind in flight allocate nothing. Timing decides how many are in flight at once, so lists
/// and pools grow by this number, instead of growing one by one in step 1000.
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
  /// src -1: any rank; `*source` receives its rank.
  virtual Work recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call, int* source) = 0;
  /// Ends pending messages with Error; joins its thread.
  virtual void close() noexcept = 0;
};

}  // namespace zcomm::coll
