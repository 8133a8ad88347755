// Symmetric allocations of a communicator: making them, and finding the one that a pointer lies in.
//
// Invariants: ids count up in call order and are equal on all ranks; an entry lives exactly as long as its
// SymmetricBuffer, which may outlive the communicator (mapped it stays as long as it is pinned). A host-wide allocation
// is one segment, rank 0's, mapped by all. Thread rule: make() as Engine::run; find() and dropping
// buffers are free-threaded.
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
  std::vector<std::byte*> bases;              ///< by rank, as this rank sees them; with `shared` all the same
  std::vector<std::shared_ptr<void>> owners;  ///< what keeps them there

  std::byte* base(int of_rank) const { return bases[static_cast<std::size_t>(of_rank)]; }
  std::byte* own() const { return base(rank); }
  std::uint64_t offset_of(const void* p) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(p) - own());
  }
  /// What `peer` has where this rank has `p`.
  std::byte* at_peer(int peer, const void* p) const { return base(peer) + offset_of(p); }
};

/// Memory was refused on some rank: all ranks throw it, and the communicator stays usable.
struct AllocationRefused : SystemError {
  using SystemError::SystemError;
};

class SymmetricMemory {
 public:
  SymmetricMemory();

  /// Collective. If memory is refused on any rank, every rank throws AllocationRefused and nothing is left behind.
  std::shared_ptr<SymmetricBuffer> make(net::Mesh& mesh, std::size_t nbytes, bool shared, double timeout_s);

  /// Of memory that an engine has made by itself, on all ranks alike; `bases` and `owners` as in Allocation.
  std::shared_ptr<SymmetricBuffer> keep(std::size_t nbytes, int rank, std::vector<std::byte*> bases,
                                        std::vector<std::shared_ptr<void>> owners);
  /// The id of what is made next.
  std::uint64_t next_id() const { return next_id_; }

  /// The allocation that holds all of [p, p + nbytes), or null.
  const Allocation* find(const void* p, std::size_t nbytes) const;
  /// The allocation of that id, which stays mapped as long as the result lives; null if this rank has dropped it.
  std::shared_ptr<const Allocation> pin(std::uint64_t id) const;
  CommMemory memory() const;
  /// For memory that an engine makes by itself: memory() counts `nbytes` as own until the result is gone.
  std::shared_ptr<void> account(std::size_t nbytes);

 private:
  struct Registry;
  class BufferImpl;
  std::shared_ptr<Registry> registry_;
  std::uint64_t next_id_ = 1;
};

}  // namespace zcomm::coll
