// DeviceDirect: collectives on symmetric device memory, with no staging (decisions D1, D2).
//
// Owner computes, as in DirectPath on the host: rank r reads chunk r of all inputs once, in rank order, and stores the
// result once at its final address. Copy engines do the copies. Invariant: all of it happens between the entry's round
// and the next one, so no buffer is changed or reused while a peer reads it. Thread rule: as Engine::run.
#pragma once

#include <vector>

#include "coll/cuda/ipc_rounds.hpp"
#include "coll/operation.hpp"
#include "coll/shm/direct.hpp"

namespace zcomm::coll {

class DeviceDirect {
 public:
  /// remote: the number of ranks on another device.
  DeviceDirect(const HostMemory& memory, DeviceRounds& rounds, int remote);
  /// Puts this rank's part on the stream.
  void run(const Operation& operation, Path path);

 private:
  void reduce(const Signature& signature, const Item& item);
  void pull(const Signature& signature, const Item& item);
  void push(const Signature& signature, const Item& item);

  device::Stream& stream_;
  const int rank_, world_size_, remote_;
  std::vector<const void*> sources_;
  std::vector<void*> targets_;
};

}  // namespace zcomm::coll
