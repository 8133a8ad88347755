// Handshake: from listeners to one authenticated channel between each two ranks.
//
// [Note: handshake] Rank r connects to all lower ranks and accepts from all higher ones, all in one poll loop. Client:
// checks that the listener is our user's, sends a Hello (magic, version, rank, world size, token) with its pidfd, waits
// for the Ack (token again, one end of a fresh socket pair = the control channel, the other's pidfd). Server: silently
// drops a client of another user, a slow one, or one that sends a wrong Hello, and continues; a dropped client tries
// again until the deadline, so that a slow legitimate one is not lost. The user id excludes other users; the token
// separates jobs of one user. Invariant: nothing but a Hello (Ack) is read before it has matched. Thread rule: one call
// per rank. Source: unix(7), pidfd_open(2).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.hpp"
#include "net/mesh.hpp"

namespace zcomm::net {

/// This rank's descriptors for one other rank; all empty for itself.
struct Channel {
  UniqueFd data;     ///< parcels of exchange()
  UniqueFd control;  ///< goodbyes; its end means that the peer ended
  UniqueFd process;  ///< pidfd of the peer: shows its death even if a forked child keeps its sockets open
};

inline constexpr std::size_t kMaxTokenNbytes = 256;

/// Throws Timeout, PeerLost, SystemError as Mesh::connect does; arguments have been checked.
std::vector<Channel> connect_all(int rank, const Listener& listener, std::span<const std::string> addresses,
                                 std::string_view token, double timeout_s);

}  // namespace zcomm::net
