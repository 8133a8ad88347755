// TcpHalving: all_reduce by recursive halving and doubling, for small data and large worlds.
//
// With 2^m ranks: in each of m steps a rank exchanges half of its remaining sums with the rank 2^k away, then the sums
// return the same way. Other worlds: the first pairs of ranks act as one (the even rank sends all its data to the odd
// rank and receives the result). Each element is summed by one rank in a fixed order and rounded there once. Cost: 2
// log2 P steps (2 more if P is not a power of two) instead of 2 (P-1); about 2 N bytes sent, sums of 2-byte floats in
// fp32; N (1.5 partials + 1 result) of scratch.
// Thread rule: the thread that runs the operation. Source: Thakur, Rabenseifner, Gropp 2005, section 4.
#pragma once

#include <cstddef>
#include <vector>

#include "coll/tcp/chunks.hpp"
#include "coll/tcp/sockets.hpp"

namespace zcomm::coll {

class TcpHalving {
 public:
  explicit TcpHalving(TcpSockets& sockets) : sockets_(sockets) {}
  void all_reduce(const TcpChunks& chunks, const Signature& signature);
  std::size_t nbytes() const { return sums_.capacity() + came_.capacity() + results_.capacity(); }

 private:
  void swap(int peer, std::span<const std::byte> out, std::span<std::byte> in);

  TcpSockets& sockets_;
  std::vector<std::byte> sums_, came_, results_;
  std::vector<Range> ranges_;  // the remaining sums before each halving
  TcpTransfer both_[2] = {{0, false}, {0, true}};
};

}  // namespace zcomm::coll
