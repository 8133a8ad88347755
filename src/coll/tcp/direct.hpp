// TcpDirect: every rank sends directly to the ranks that need its data, all at once. For data too small for the ring,
// for sums in rank order, and for operations with one obvious algorithm: gather, scatter, all_to_all.
//
// reduce_scatter: rank r receives chunk r of all and reduces in rank order, rounding once: the bits of one host's path,
// at any size. It goes in pieces of kPieceNbytes per rank, which bounds scratch; while a piece is reduced, the next one
// arrives in the sockets' buffers.
// Bytes sent per rank: reduce_scatter, all_gather (P-1)/P N; gather, scatter: the root all of it; broadcast: binomial
// tree, ceil(log2 P) steps; all_to_all: the given counts, pair by pair (rank r with r + s and r - s in step s). Thread
// rule: the thread that runs the operation.
#pragma once

#include <cstddef>
#include <vector>

#include "coll/tcp/chunks.hpp"
#include "coll/tcp/sockets.hpp"

namespace zcomm::coll {

class TcpDirect {
 public:
  static constexpr std::size_t kPieceNbytes = 1 << 20;

  explicit TcpDirect(TcpSockets& sockets) : sockets_(sockets) {}

  /// The own chunk's result goes to `result` if that is not null, else into the outputs.
  void reduce_scatter(const TcpChunks& chunks, const Signature& signature, std::byte* result);
  /// The own chunk must be in place in the outputs.
  void all_gather(const TcpChunks& chunks, std::size_t size);
  /// Chunks to the root's outputs; the root's own is in place. `chunk`: this rank's, or null if it is in its items'
  /// inputs.
  void gather(const TcpChunks& chunks, std::size_t size, int root, const std::byte* chunk);
  /// Shape::parts: from the root's inputs to all outputs. Shape::whole: chunks, in place.
  void scatter(const TcpChunks& chunks, std::size_t size, int root, TcpChunks::Shape shape);
  void broadcast(const TcpChunks& chunks, std::size_t size, int root);
  void all_to_all(std::span<const Item> items, std::size_t size);
  /// Copies this rank's part from the inputs to its position in the outputs.
  void place_own(const TcpChunks& chunks, std::size_t size);

  std::size_t nbytes() const { return scratch_.capacity(); }

 private:
  void reduce_piece(const TcpChunks& chunks, const Signature& signature, std::byte* result, std::size_t begin,
                    std::size_t end);
  TcpTransfer& transfer(int peer, bool out);
  void move();

  TcpSockets& sockets_;
  std::vector<TcpTransfer> transfers_;  // kept for their capacity
  std::size_t used_ = 0;
  std::vector<std::byte> scratch_;
  std::vector<const void*> sources_;
};

}  // namespace zcomm::coll
