// Exchange: each rank sends one parcel (bytes and at most one descriptor) to each other rank over the data sockets.
//
// Invariants: frames are numbered and the numbers compared, so parcels of two exchanges never mix; an unannounced
// descriptor is closed. After a failure the streams may be cut anywhere: every later call fails with it. Thread rule:
// run() is serialised by the caller; abort() may be called from any thread. Source: unix(7).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"
#include "net/mesh.hpp"

namespace zcomm::net {

class Monitor;

class Exchange {
 public:
  /// sockets: by rank, empty for `rank`.
  Exchange(int rank, std::vector<UniqueFd> sockets);

  /// See Mesh::exchange.
  std::vector<Parcel> run(Parcel mine, double timeout_s, const Monitor& monitor);

  /// Makes a running run() fail; our peers see the end of the stream.
  void abort() noexcept;
  /// Not concurrently with run().
  void close() noexcept { sockets_.clear(); }

 private:
  std::vector<Parcel> run_checked(Parcel mine, double timeout_s, const Monitor& monitor);

  int rank_;
  std::vector<UniqueFd> sockets_;
  std::uint64_t sequence_ = 0;
  std::string failure_;
};

}  // namespace zcomm::net
