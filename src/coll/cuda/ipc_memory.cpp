// Symmetric memory on devices (coll/cuda/ipc_memory.hpp).
#include "coll/cuda/ipc_memory.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

constexpr std::size_t kToldDrops = 64;  // at a time

struct Drops {
  std::uint64_t count = 0;
  std::uint64_t ids[kToldDrops] = {};
};

struct Vote {
  char refusal[400] = {};  ///< empty: all is well
  device::SharedHandle handle;
};

}  // namespace

/// This rank's memory, which others may have open, and the peers' memory opened here, which is closed first.
struct DeviceHeap::Buffer {
  device::Memory own;
  std::vector<std::shared_ptr<void>> peers;
};

/// Allocations that this rank has dropped. Outlives the engine as long as a buffer lives.
struct DeviceHeap::Dropped {
  std::mutex mutex;
  bool open = true;                   ///< the engine still exists and can ask the others
  std::vector<std::uint64_t> untold;  ///< not yet announced
  std::map<std::uint64_t, Buffer> kept;

  void add(std::uint64_t id, Buffer buffer) {
    const std::lock_guard lock(mutex);
    if (!open) return;
    untold.push_back(id);
    kept.emplace(id, std::move(buffer));
  }
  /// From now on dropped memory is freed at once.
  void close_peers() {
    const std::lock_guard lock(mutex);
    open = false;
    for (auto& [id, buffer] : kept) buffer.peers.clear();
  }
};

DeviceHeap::DeviceHeap(std::shared_ptr<DeviceLiveness> waits, const HostMemory& memory, DeviceRounds& rounds,
                       SymmetricMemory& symmetric)
    : waits_(std::move(waits)),
      memory_(memory),
      rounds_(rounds),
      symmetric_(symmetric),
      passed_(waits_->device().make_event()),
      dropped_(std::make_shared<Dropped>()) {}

DeviceHeap::~DeviceHeap() {
  const std::lock_guard lock(dropped_->mutex);
  dropped_->open = false;
  dropped_->kept.clear();
}

void DeviceHeap::close_peers() noexcept { dropped_->close_peers(); }

void DeviceHeap::abandon() noexcept {
  static std::mutex mutex;
  static auto* const left = new std::vector<std::map<std::uint64_t, Buffer>>;
  const std::lock_guard lock(mutex), own(dropped_->mutex);
  left->push_back(std::move(dropped_->kept));
}

void DeviceHeap::share_drops(const Signature& during) {
  Drops mine;
  {
    const std::lock_guard lock(dropped_->mutex);
    mine.count = std::min(dropped_->untold.size(), kToldDrops);
    std::copy_n(dropped_->untold.begin(), mine.count, mine.ids);
    dropped_->untold.erase(dropped_->untold.begin(),
                           dropped_->untold.begin() + static_cast<std::ptrdiff_t>(mine.count));
  }
  if (mine.count > 0) {
    rounds_.stream().record(*passed_);
    waits_->wait(*passed_, during);  // the last that read the peers' memory
    const std::lock_guard lock(dropped_->mutex);
    for (std::size_t i = 0; i < mine.count; ++i) dropped_->kept.at(mine.ids[i]).peers.clear();
  }
  rounds_.all_gather_on_host(&mine, sizeof(mine));
  std::vector<std::uint64_t> free;
  for (int rank = 0; rank < memory_.world_size(); ++rank) {
    Drops theirs;
    std::memcpy(&theirs, rounds_.gathered(rank), sizeof(theirs));
    for (std::size_t i = 0; i < theirs.count; ++i)
      if (++drops_[theirs.ids[i]] == memory_.world_size()) free.push_back(theirs.ids[i]);
  }
  forget(free);
  rounds_.barrier_on_host();
}

void DeviceHeap::forget(const std::vector<std::uint64_t>& ids) {
  const std::lock_guard lock(dropped_->mutex);
  for (const std::uint64_t id : ids) {
    drops_.erase(id);
    dropped_->kept.erase(id);
  }
}

device::Memory DeviceHeap::zeroed(std::size_t nbytes, const Signature& during) {
  device::Memory memory =
      waits_->device().allocate(memory_.world_size() > 1 ? device::in_shared_blocks(nbytes) : nbytes);
  rounds_.stream().fill(memory.get(), 0, nbytes);
  rounds_.stream().record(*passed_);
  waits_->wait(*passed_, during);  // its owner may use it on any stream
  return memory;
}

void DeviceHeap::make(const Operation& operation) {
  const Signature& signature = operation.signature;
  if (signature.kind == OpKind::allocate_shared) {
    operation.allocate->refused = std::make_exception_ptr(
        Unsupported("shared_empty: ranks on devices have memory of their own each; use empty(..., device=\"cuda\")"));
    return;
  }
  share_drops(signature);
  const std::size_t ranks = static_cast<std::size_t>(memory_.world_size()),
                    nbytes = std::max<std::size_t>(signature.count, 1);
  Vote mine;
  device::Memory own;
  const auto refuse = [&mine](const CudaError& error) {
    std::strncpy(mine.refusal, error.what(), sizeof(mine.refusal) - 1);
  };
  try {
    own = zeroed(nbytes, signature);
    if (ranks > 1) mine.handle = waits_->device().share(own.get());
  } catch (const CudaError& error) {
    refuse(error);
  }
  rounds_.all_gather_on_host(&mine, sizeof(mine));
  std::vector<Vote> votes(ranks);
  for (std::size_t r = 0; r < ranks; ++r) std::memcpy(&votes[r], rounds_.gathered(static_cast<int>(r)), sizeof(Vote));
  std::vector<std::byte*> bases(ranks);
  std::vector<std::shared_ptr<void>> owners(ranks);
  rounds_.barrier_on_host();

  const auto refused = [&] {
    std::string by;
    for (std::size_t r = 0; r < ranks; ++r)
      if (votes[r].refusal[0] != '\0') by += text(by.empty() ? "" : "; ", "rank ", r, ": ", votes[r].refusal);
    if (!by.empty())
      operation.allocate->refused =
          std::make_exception_ptr(CudaError(text("allocating ", signature.count, " bytes was refused on ", by)));
    return !by.empty();
  };
  if (refused()) return;
  try {
    for (std::size_t r = 0; r < ranks; ++r) {
      if (static_cast<int>(r) != memory_.rank()) owners[r] = waits_->device().open_memory(votes[r].handle);
      bases[r] = static_cast<std::byte*>(owners[r] ? owners[r].get() : own.get());
    }
  } catch (const CudaError& error) {
    refuse(error);
  }
  rounds_.all_gather_on_host(&mine, sizeof(mine));
  for (std::size_t r = 0; r < ranks; ++r) std::memcpy(&votes[r], rounds_.gathered(static_cast<int>(r)), sizeof(Vote));
  if (refused()) owners.clear();  // close before the owners free
  rounds_.barrier_on_host();
  if (operation.allocate->refused) return;
  std::vector<std::shared_ptr<void>> owner{own};
  if (ranks > 1)
    owner[0] = {own.get(), [dropped = dropped_, id = symmetric_.next_id(), mine = own, peers = owners](void*) mutable {
                  dropped->add(id, {std::move(mine), std::move(peers)});
                }};
  operation.allocate->buffer = symmetric_.keep(signature.count, memory_.rank(), std::move(bases), std::move(owner));
}

}  // namespace zcomm::coll
