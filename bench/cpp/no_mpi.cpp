// Built without MPI (bench/cpp/mpi_peer.hpp).
#include <cstdlib>

#include "mpi_peer.hpp"
#include "zcomm/error.hpp"

namespace zcomm::bench {

bool under_mpirun() { return std::getenv("OMPI_COMM_WORLD_RANK") != nullptr || std::getenv("PMI_RANK") != nullptr; }

std::unique_ptr<MpiPeer> MpiPeer::start() {
  if (under_mpirun())
    throw Unsupported(
        "this zcomm_bench was built without MPI (Debian: libopenmpi-dev); start it without mpirun, -np RANKS");
  return nullptr;
}

}  // namespace zcomm::bench
