// MPI as a peer: built with MPI (mpi_peer.cpp) or without (no_mpi.cpp).
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace zcomm::bench {

class MpiPeer {
 public:
  /// Nothing unless mpirun started this process. Throws Unsupported if the bench was built without MPI.
  static std::unique_ptr<MpiPeer> start();
  virtual ~MpiPeer() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::string version() const = 0;
  /// Texts of all ranks, by rank.
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;
  virtual void all_reduce(float* values, int count) = 0;
  virtual void barrier() = 0;
};

/// Whether mpirun started this process.
bool under_mpirun();

}  // namespace zcomm::bench
