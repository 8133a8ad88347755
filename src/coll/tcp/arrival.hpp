// TcpArrival: all ranks enter an operation together and compare it; small data travels in the same messages (D5).
//
// [Note: arrival] Dissemination: in round k a rank tells the rank 2^k after it whether all signatures known to it
// agree, and hears the same from the rank 2^k before it. After ceil(log2 P) rounds every rank knows about all, so
// either no rank has seen a difference or all have; then whole signatures are exchanged and all ranks throw the same
// error. It is also a barrier. Small cargo travels in the same messages: one block of each rank (as in Bruck's
// all-gather), or the root's block. The cargo of a message is not used before its identity was compared. Thread rule:
// the thread that runs the operation. Source: Hensgen, Finkel, Manber 1988; Bruck et al. 1997.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "coll/tcp/sockets.hpp"

namespace zcomm::coll {

/// A hash of all that must agree, including the sequence number.
inline std::uint64_t identity_of(const Signature& signature) { return mix(signature.identity, signature.sequence); }

class TcpArrival {
 public:
  static constexpr std::size_t kMaxCargoNbytes = 64 << 20;  ///< of all blocks; a larger size in a message is invalid

  explicit TcpArrival(TcpSockets& sockets);

  /// Compares this signature as well as the operation's, and reports it instead, until the next call.
  void show(const Signature* signature) { shown_ = signature; }

  /// No cargo.
  void enter(const Signature& signature);
  /// Each rank contributes `nbytes`, which it has written to block(rank()); afterwards block(r) is rank r's.
  void enter_gathering(const Signature& signature, std::size_t nbytes);
  /// The root contributes `nbytes` at block(root); afterwards all ranks have them in that block.
  void enter_broadcasting(const Signature& signature, std::size_t nbytes, int root);
  /// Makes room for the cargo, to be called before it is filled.
  void reserve(std::size_t nbytes_of_all);
  std::byte* block(int rank, std::size_t nbytes);

  /// The handler for the signatures of a mismatch; throws. By default CollectiveMismatch (require_same).
  std::function<void(std::span<const Signature> by_rank)> on_mismatch;
  std::size_t nbytes() const { return cargo_.capacity(); }

 private:
  enum class Mode { none, gather, broadcast };
  void run(const Signature& signature, Mode mode, std::size_t nbytes, int root);
  bool round(int distance, std::uint64_t identity, bool differs, std::span<const std::byte> out,
             std::span<std::byte> in);
  void compare_whole(const Signature& signature);

  TcpSockets& sockets_;
  const Signature* shown_ = nullptr;
  std::vector<std::byte> cargo_;  // gather: slot d holds the block of rank - d
  std::vector<std::byte> waste_;
  TcpTransfer send_{0, true}, recv_{0, false};
};

}  // namespace zcomm::coll
