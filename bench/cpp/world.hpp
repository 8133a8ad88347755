// The ranks of a bench: forked here, or started by mpirun.
//
// Invariant: forked ranks never outlive the parent (PR_SET_PDEATHSIG), and one that fails ends the others.
#pragma once

#include <functional>
#include <memory>

#include "mpi_peer.hpp"
#include "net/mesh.hpp"
#include "options.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::bench {

struct Rank {
  int rank, world_size;
  std::unique_ptr<MpiPeer> mpi;  ///< if mpirun started the ranks; destroyed last, because it finalises MPI
  std::shared_ptr<net::Mesh> mesh;
  std::unique_ptr<Communicator> comm;
};

/// Runs `body` as each rank; returns the exit code: 0 if every rank returned 0.
int run_ranks(const Options& options, const std::function<int(Rank&)>& body);

}  // namespace zcomm::bench
