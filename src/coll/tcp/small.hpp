// TcpSmall: operations so small that their data travels in the messages that compare them ([Note: arrival]).
//
// Every rank receives every rank's input and computes its own results, reducing in rank order: the bits of one host's
// path. Cost: ceil(log2 P) messages in sequence, P N bytes received. Thread rule: the thread that runs the operation.
#pragma once

#include <cstddef>
#include <vector>

#include "coll/operation.hpp"
#include "coll/tcp/arrival.hpp"

namespace zcomm::coll {

class TcpSmall {
 public:
  TcpSmall(TcpSockets& sockets, TcpArrival& guard) : sockets_(sockets), arrival_(guard) {}

  /// Bytes that each rank would contribute (only the root, if only the root has data); all kinds that move data but
  /// all_to_all.
  static std::size_t cargo_nbytes(const Operation& operation, int world_size);
  /// Enters and carries out.
  void run(const Operation& operation);

 private:
  void pack(std::span<const Item> items, std::size_t repeat, std::byte* to) const;
  void reduce(const Operation& operation);
  void take(const Operation& operation);

  TcpSockets& sockets_;
  TcpArrival& arrival_;
  std::size_t size_ = 0, nbytes_ = 0;
  std::vector<const void*> sources_;
};

}  // namespace zcomm::coll
