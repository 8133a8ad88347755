// HierarchicalEngine: shared memory within each host, links between hosts (decision D2).
//
// [Note: two levels] A rank has a local rank on its host. The ranks with the same local rank, on all hosts, form a
// TcpGroup; the ranks of one host form a ShmEngine. First the host's ranks compare their operations (an all_gather of
// signatures), then each group compares them between hosts. Then data moves: N elements per rank, g ranks on each of H
// hosts, P = g H:
//   all_reduce       reduce_scatter on the host, all_reduce of the N/g own in the group, all_gather on the host:
//                    2 N/g (H-1)/H between hosts per rank (2-byte floats: in fp32, rounded once at the end); large ones
//                    in pieces, so that both levels move data at once
//   reduce           as all_reduce, through scratch
//   reduce_scatter   on the host (N), then in the group (N/g)
//   all_gather       in the group (N/P each), then on the host
//   broadcast        in the root's group, then on each host
//   gather, scatter  in the group to or from the root's host; there by all_gather or broadcast through scratch
//   all_to_all       on the host to the local rank of the target, then in the group
// Messages go directly over links (also on the host), if there is one to each rank. allocate() is symmetric on the
// host; allocate_shared() is refused if there is more than one host.
// Failures of one level end the other: all ranks report the first one.
// Thread rule: as Engine's.
#pragma once

#include <memory>
#include <vector>

#include "coll/tcp/engine.hpp"

namespace zcomm::coll {

struct HierarchicalOptions {
  TcpOptions link;
  std::size_t slot_nbytes = CommOptions{}.slot_nbytes;  ///< of the shared-memory part
  int slot_count = CommOptions{}.slot_count;
  std::size_t piece_nbytes = 4 << 20;  ///< at least, of an all_reduce's pieces; the same on all ranks
};

/// Collective over `mesh`. host_of_rank: by rank of the mesh; each host must have equally many ranks. `host_mesh` joins
/// this host's ranks, in rank order. links: by rank of the mesh; as for create_linked to the ranks with this rank's
/// local rank on the other hosts, and one link for messages to each other rank (without these, send and recv with those
/// ranks are Unsupported, and some errors are less exact). Throws InvalidArgument for uneven hosts.
std::unique_ptr<Communicator> create_hierarchical(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<net::Mesh> host_mesh,
                                                  std::vector<int> host_of_rank, std::vector<PeerSockets> links,
                                                  HierarchicalOptions options = {});

}  // namespace zcomm::coll
