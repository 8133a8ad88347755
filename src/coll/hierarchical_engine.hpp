// HierarchicalEngine: shared memory inside of each host, links between hosts.
#pragma once

#include <memory>
#include <vector>

#include "coll/link_engine.hpp"

namespace zcomm::coll {

struct HierarchicalOptions {
  LinkOptions link;
  std::size_t slot_nbytes = CommOptions{}.slot_nbytes;  ///< of the shared-memory part
  int slot_count = CommOptions{}.slot_count;
};

/// Collective over `mesh`. host_of_rank: by rank of the mesh; each host must have as many ranks. `host_mesh` joins this
/// host's ranks, in the order of their ranks. links: as for create_linked, to the ranks with this rank's position on
/// the other hosts; none to all others. Throws InvalidArgument for uneven hosts.
std::unique_ptr<Communicator> create_hierarchical(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<net::Mesh> host_mesh,
                                                  std::vector<int> host_of_rank, std::vector<LinkSockets> links,
                                                  HierarchicalOptions options = {});

}  // namespace zcomm::coll
