// TcpEngine: the operations of one communicator over stream sockets, between hosts.
//
// Every operation begins with [Note: arrival], in which all ranks compare it; operations with small data end there. The
// others use one of three algorithms, chosen by size and world (choose() in engine.cpp; ZCOMM_LINK_ALGO overrides). One
// thread of its own (TcpControl) carries messages, and sends failures to all peers at once; collectives run on the
// caller's thread or the executor's. No memory is shared: allocate() returns private memory, allocate_shared() and
// duplicate() throw Unsupported. Thread rule: as Engine's.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/unique_fd.hpp"
#include "net/mesh.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::coll {

/// Connected stream sockets to one peer, in the same order on both sides: [0] collectives, [1] messages, [2] and
/// further: more sockets for the ring, used between neighbours (ranks r and r + 1, and the last with the first).
using PeerSockets = std::vector<UniqueFd>;

struct TcpOptions {
  double timeout_s = 600.0;                ///< deadline of every operation, from the moment it starts
  std::size_t segment_nbytes = 256 << 10;  ///< the pipelined piece of a ring
  double limit_s = 0.0;                    ///< as CommOptions has them
  double warn_s = 60.0;
};

/// Collective over `mesh`. links: by rank of the mesh, two sockets or more per peer, none for the rank itself.
std::unique_ptr<Communicator> create_linked(std::shared_ptr<net::Mesh> mesh, std::vector<PeerSockets> links,
                                            TcpOptions options = {});

}  // namespace zcomm::coll
