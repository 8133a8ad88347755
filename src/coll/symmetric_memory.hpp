// Symmetric allocations of a communicator: making them, and finding the allocation of a pointer.
//
// Invariants: ids count up in call order and are equal on all ranks; an entry lives exactly as long as its
// SymmetricBuffer, which may outlive the communicator (pinned memory stays mapped). A host-wide allocation is one
// segment, rank 0's, mapped by all. Thread rule: make() as Engine::run; find() and dropping buffers are free-threaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "heap/segment.hpp"
#include "net/mesh.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/error.hpp"

namespace zcomm::coll {

struct Allocation {
  std::uint64_t id = 0;
  std::size_t nbytes = 0;
  int rank = 0;
  bool shared = false;
  std::vector<std::byte*> bases;              ///< by rank, as this rank maps them; with `shared` all the same
  std::vector<std::shared_ptr<void>> owners;  ///< keep the memory alive

  std::byte* base(int of_rank) const { return bases[static_cast<std::size_t>(of_rank)]; }
  std::byte* own() const { return base(rank); }
  std::uint64_t offset_of(const void* p) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(p) - own());
  }
  /// The address at `peer` that corresponds to `p` on this rank.
  std::byte* at_peer(int peer, const void* p) const { return base(peer) + offset_of(p); }
};

/// Memory was refused on some rank: all ranks throw it, and the communicator stays usable.
struct AllocationRefused : SystemError {
  using SystemError::SystemError;
};

class SymmetricMemory {
 public:
  SymmetricMemory();

  /// Collective. If memory is refused on any rank, every rank throws AllocationRefused and all memory is freed.
  std::shared_ptr<SymmetricBuffer> make(net::Mesh& mesh, std::size_t nbytes, bool shared, double timeout_s);

  /// For memory that an engine has allocated itself, equally on all ranks; `bases` and `owners` as in Allocation.
  std::shared_ptr<SymmetricBuffer> keep(std::size_t nbytes, int rank, std::vector<std::byte*> bases,
                                        std::vector<std::shared_ptr<void>> owners);
  /// The id of the next allocation.
  std::uint64_t next_id() const { return next_id_; }

  /// The allocation that holds all of [p, p + nbytes), or null.
  const Allocation* find(const void* p, std::size_t nbytes) const;
  /// The allocation of that id, which stays mapped as long as the result lives; null if this rank has dropped it.
  std::shared_ptr<const Allocation> pin(std::uint64_t id) const;
  CommMemory memory() const;
  /// For memory that an engine allocates itself: memory() counts `nbytes` as own until the result is destroyed.
  std::shared_ptr<void> account(std::size_t nbytes);

 private:
  struct Registry;
  class BufferImpl;
  std::shared_ptr<Registry> registry_;
  std::uint64_t next_id_ = 1;
};

}  // namespace zcomm::coll
