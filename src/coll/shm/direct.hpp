// Direct path: collectives on symmetric memory, with no staging and no copies (decisions D1, D2).
//
// Owner computes: rank r reads chunk r of all inputs once, in rank order, and stores the result once at its final
// address (reduce: in root's buffer only).
// Invariants: only signatures decide the path, so all ranks choose the same one; peers' memory is touched only between
// entry (all have arrived) and the exit barrier (all are done), so no buffer changes or is reused while a peer reads
// it. Thread rule: as Engine::run.
#pragma once

#include <cstdint>
#include <vector>

#include "coll/operation.hpp"
#include "coll/plan.hpp"
#include "coll/shm/liveness.hpp"
#include "device/kernels.hpp"

namespace zcomm::coll {

enum class Path : std::uint8_t {
  staged,
  in_place,  ///< all buffers that peers touch lie at the same offset of symmetric memory
  pull,      ///< the side that is read is symmetric; each rank reads it
  push,      ///< the side that is written is symmetric; each rank writes its part
};

/// The path that the entries of all ranks allow.
Path choose_path(OpKind kind, int world_size, const std::function<const Entry&(int rank)>& entry_of);

class DirectPath {
 public:
  DirectPath(const HostMemory& memory, Liveness& liveness);
  void run(const Operation& operation, Path path);

 private:
  void all_reduce(const Signature& signature, const Item& item);
  void reduce(const Signature& signature, const Item& item);
  void reduce_scatter(const Operation& operation, const Item& item);
  void reduce_range(const Signature& signature, const Item& item, Range range, const void* own, device::Stores stores);
  void pull(const Signature& signature, const Item& item);
  void push(const Signature& signature, const Item& item);
  void broadcast(const Signature& signature, const Item& item);

  const HostMemory& memory_;
  Liveness& liveness_;
  const int rank_, world_size_;
  std::uint32_t done_ = 0;  // direct operations so far
  std::vector<const void*> sources_;
  std::vector<void*> targets_;
};

}  // namespace zcomm::coll
