// Options that a TCP socket needs and a unix one does not: no delay of small messages, and an end when the other host
// is dead.
//
// [Note: dead host] Only control sockets time out. A data socket has a closed window while its reader is busy for
// minutes, and TCP_USER_TIMEOUT would cut it although the reader lives; the control socket carries one byte in its
// life, and its end is the end of the peer for all sockets. Thread rule: free functions without state. All do nothing
// to sockets of other families. Source: tcp(7).
#pragma once

#include <string>

namespace zcomm::net {

/// How long a host may be silent before its ranks count as dead.
inline constexpr int kHostDeath_s = 15;

/// Close-on-exec, TCP_NODELAY. `peer_rank` is for messages. Throws SystemError.
void make_prompt(int socket, int peer_rank);

/// Keepalive and TCP_USER_TIMEOUT: reads end with an error kHostDeath_s after the last sign of the peer's host.
void notice_dead_host(int socket, int peer_rank);

/// The other side's address, without its port; "" for sockets of other families.
std::string peer_address(int socket);

}  // namespace zcomm::net
