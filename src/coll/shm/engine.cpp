// Running one operation (coll/shm/engine.hpp).
#include "coll/shm/engine.hpp"

#include <exception>
#include <utility>

#include "base/error.hpp"
#include "base/interrupt.hpp"

namespace zcomm {
namespace coll {

ShmEngine::ShmEngine(std::shared_ptr<net::Mesh> mesh, const CommOptions& options, SymmetricMemory& symmetric)
    : mesh_(std::move(mesh)),
      symmetric_(symmetric),
      memory_(*mesh_, options),
      liveness_(mesh_, memory_, times_of(options)),
      arrival_(memory_, liveness_),
      slot_ring_(memory_, liveness_),
      staged_(memory_, liveness_, slot_ring_),
      staged_all_to_all_(memory_, slot_ring_),
      direct_(memory_, liveness_),
      one_shot_(memory_, options.one_shot_nbytes),
      peer_copy_(memory_, liveness_, slot_ring_, symmetric_),
      messenger_(mesh_, memory_, times_of(options)) {}

void ShmEngine::close() noexcept {
  liveness_.close();
  messenger_.close();
}

void ShmEngine::run(Operation& operation) {
  try {
    const bool small = one_shot_.takes(operation);
    if (small) bring_home(operation, rank());
    arrival_.enter(operation.signature, [&](std::uint32_t number) {
      if (small) one_shot_.bring(operation, number);
    });
    if (small)
      one_shot_.finish(operation);
    else
      work(operation);
    // Fetches the next entry's cache line back from its readers while no rank waits for it.
    fetch_for_writing(&memory_.own().entries[(arrival_.number() + 1) & 1]);
  } catch (const CollectiveMismatch&) {
    throw;  // the other ranks detect it themselves
  } catch (const Interrupted&) {
    liveness_.leave();
    throw;
  } catch (const std::exception& error) {
    liveness_.fail(text(describe(operation.signature), ": ", error.what()));  // no effect if a failure was set before
    throw;
  }
}

void ShmEngine::work(Operation& operation) {
  switch (operation.signature.kind) {
    case OpKind::barrier:
    case OpKind::duplicate:
      return;
    case OpKind::allocate:
    case OpKind::allocate_shared: {
      const bool shared = operation.signature.kind == OpKind::allocate_shared;
      try {
        operation.allocate->buffer = symmetric_.make(*mesh_, operation.signature.count, shared, liveness_.longest_s());
      } catch (const AllocationRefused&) {
        operation.allocate->refused = std::current_exception();  // all ranks know; the communicator stays usable
      }
      return;
    }
    case OpKind::gather:
    case OpKind::scatter:
    case OpKind::all_to_all:
      return work_by_peer_copy(operation);
    default:
      break;
  }
  const Path path = choose_path(operation.signature.kind, memory_.world_size(),
                                [this](int rank) -> const Entry& { return arrival_.entry(rank); });
  if (path != Path::staged) return direct_.run(operation, path);
  bring_home(operation, rank());
  staged_.run(operation);
}

void ShmEngine::work_by_peer_copy(const Operation& operation) {
  const SignatureOf signature_of = [this](int rank) -> const Signature& { return arrival_.signature(rank); };
  const bool uneven = operation.signature.kind == OpKind::all_to_all;
  if (uneven) staged_all_to_all_.compare(operation, signature_of);
  const Path path = choose_peer_copy_path(operation.signature, world_size(), memory_.slot_nbytes(), signature_of);
  if (path != Path::staged && peer_copy_.run(operation, path)) return;
  if (uneven)
    staged_all_to_all_.run(operation, signature_of);
  else
    staged_.run(operation);
}

}  // namespace coll

std::unique_ptr<Communicator> Communicator::create(std::shared_ptr<net::Mesh> mesh, CommOptions options) {
  if (!mesh) throw InvalidArgument("Communicator::create: no mesh");
  return coll::make_communicator([mesh = std::move(mesh), options](coll::SymmetricMemory& memory) {
    return std::make_unique<coll::ShmEngine>(mesh, options, memory);
  });
}

}  // namespace zcomm
