// Link: a full-duplex byte stream to one neighbour, as a ring needs it.
//
// Non-blocking halves plus a pollable descriptor, so that one thread can send and receive at once and never deadlocks.
// Implemented by StreamLink over any stream socket (unix here; TCP uses the same).
// Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/unique_fd.hpp"

namespace zcomm::net {

class Link {
 public:
  virtual ~Link() = default;
  /// Sends what fits now; returns the bytes taken (0: would block). Throws PeerLost when the stream ended.
  virtual std::size_t try_send(std::span<const std::byte> bytes) = 0;
  /// Receives what is there; returns the bytes stored (0: would block). Throws PeerLost when the stream ended.
  virtual std::size_t try_recv(std::span<std::byte> bytes) = 0;
  virtual int fd() const = 0;
  virtual int peer_rank() const = 0;
};

/// Link over a connected stream socket.
std::unique_ptr<Link> make_stream_link(UniqueFd socket, int peer_rank);

/// Two connected links in one process (tests, ranks as threads): first talks to `rank_b`, second to `rank_a`.
std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> make_link_pair(int rank_a, int rank_b);

/// Sends all of `out` on `to` while receiving all of `in` from `from` (which may be the same link).
/// Throws Timeout naming the neighbour waited for, PeerLost.
void send_recv(Link& to, std::span<const std::byte> out, Link& from, std::span<std::byte> in, double timeout_s);

}  // namespace zcomm::net
