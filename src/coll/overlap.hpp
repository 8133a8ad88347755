// Which buffers of one call may share memory: no output, unless an input is exactly its rank's own part of the output,
// or the other way round. A path may write an output before another input has been read. Thread rule: free-threaded.
#pragma once

#include <cstddef>
#include <span>

#include "coll/signature.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::coll {

struct OverlapCheck {
  const char* what;                 ///< the call, for the error
  OpKind kind;                      ///< barrier: no buffer may share memory with another
  std::span<const ConstBuffer> in;  ///< none if outputs are inputs
  std::span<const Buffer> out;
  std::size_t in_size, out_size;  ///< bytes of an element
  int rank;
  bool accumulate = false;
};

/// Throws InvalidArgument naming two buffers and their addresses.
void check_overlap(const OverlapCheck& call);

}  // namespace zcomm::coll
