// Running one operation (coll/shm/engine.hpp).
#include "coll/shm/engine.hpp"

#include <exception>
#include <utility>

#include "base/error.hpp"
#include "base/interrupt.hpp"

namespace zcomm {
namespace coll {

HostEngine::HostEngine(std::shared_ptr<net::Mesh> mesh, const CommOptions& options, SymmetricMemory& symmetric)
    : mesh_(std::move(mesh)),
      symmetric_(symmetric),
      memory_(*mesh_, options),
      watch_(mesh_, memory_, options.timeout_s),
      entrance_(memory_, watch_),
      turns_(memory_, watch_),
      staged_(memory_, watch_, turns_),
      staged_exchange_(memory_, turns_),
      direct_(memory_, watch_),
      one_shot_(memory_, options.one_shot_nbytes),
      told_(memory_, watch_, turns_, symmetric_),
      messenger_(mesh_, memory_, options.timeout_s) {}

void HostEngine::close() noexcept {
  watch_.close();
  messenger_.close();
}

void HostEngine::run(Operation& operation) {
  try {
    const bool small = one_shot_.takes(operation);
    if (small) bring_home(operation, rank());
    entrance_.enter(operation.header, [&](std::uint32_t number) {
      if (small) one_shot_.bring(operation, number);
    });
    if (small)
      one_shot_.finish(operation);
    else
      work(operation);
    // Takes the next entry's cache line back from those who read it, while nobody waits for it.
    fetch_for_writing(&memory_.own().entries[(entrance_.number() + 1) & 1]);
  } catch (const CollectiveMismatch&) {
    throw;  // the other ranks see it by themselves
  } catch (const Interrupted&) {
    watch_.leave();
    throw;
  } catch (const std::exception& error) {
    watch_.fail(text(describe(operation.header), ": ", error.what()));  // no effect if a failure is known already
    throw;
  }
}

void HostEngine::work(Operation& operation) {
  switch (operation.header.kind) {
    case OpKind::barrier:
    case OpKind::duplicate:
      return;
    case OpKind::allocate:
    case OpKind::allocate_shared: {
      const bool shared = operation.header.kind == OpKind::allocate_shared;
      try {
        operation.allocate->buffer = symmetric_.make(*mesh_, operation.header.count, shared, watch_.timeout_s());
      } catch (const AllocationRefused&) {
        operation.allocate->refused = std::current_exception();  // all ranks know; nothing is broken
      }
      return;
    }
    case OpKind::gather:
    case OpKind::scatter:
    case OpKind::all_to_all:
      return work_told(operation);
    default:
      break;
  }
  const Path path = choose_path(operation.header.kind, memory_.world_size(),
                                [this](int rank) -> const Entry& { return entrance_.entry(rank); });
  if (path != Path::staged) return direct_.run(operation, path);
  bring_home(operation, rank());
  staged_.run(operation);
}

void HostEngine::work_told(const Operation& operation) {
  const HeaderOf header_of = [this](int rank) -> const Header& { return entrance_.header(rank); };
  const bool uneven = operation.header.kind == OpKind::all_to_all;
  if (uneven) staged_exchange_.compare(operation, header_of);
  const Path path = choose_told_path(operation.header, world_size(), memory_.slot_nbytes(), header_of);
  if (path != Path::staged && told_.run(operation, path)) return;
  if (uneven)
    staged_exchange_.run(operation, header_of);
  else
    staged_.run(operation);
}

}  // namespace coll

std::unique_ptr<Communicator> Communicator::create(std::shared_ptr<net::Mesh> mesh, CommOptions options) {
  if (!mesh) throw InvalidArgument("Communicator::create: no mesh");
  return coll::make_communicator([mesh = std::move(mesh), options](coll::SymmetricMemory& memory) {
    return std::make_unique<coll::HostEngine>(mesh, options, memory);
  });
}

}  // namespace zcomm
