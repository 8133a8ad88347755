// Symmetric allocations (coll/symmetric_memory.hpp).
#include "coll/symmetric_memory.hpp"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

struct AllocateHello {
  std::uint64_t magic = 0x7a636f6d6d2e6132;  // "zcomm.a2"
  std::uint64_t id = 0;
  std::uint64_t nbytes = 0;
  std::uint64_t shared = 0;
  std::int64_t refused = 0;  ///< errno if memory was refused
};

AllocateHello read_hello(const net::Parcel& parcel, const AllocateHello& mine, int rank) {
  AllocateHello hello;
  if (parcel.bytes.size() == sizeof(hello)) std::memcpy(&hello, parcel.bytes.data(), sizeof(hello));
  // Signatures agreed, so only another communicator of the same ranks that allocates at the same time can differ.
  if (parcel.bytes.size() != sizeof(hello) || hello.magic != mine.magic || hello.id != mine.id ||
      hello.nbytes != mine.nbytes || hello.shared != mine.shared)
    throw CollectiveMismatch(text("allocate: rank ", rank,
                                  " allocates something else at the same time; "
                                  "allocations of several communicators need one order on all ranks"));
  return hello;
}

/// Unique among all registries, also later ones.
std::uint64_t new_edition() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

struct SymmetricMemory::Registry {
  mutable std::mutex mutex;
  std::vector<std::shared_ptr<const Allocation>> live;  // sorted by own address
  // Bounds of all own addresses so far: most pointers outside this registry are rejected without the lock.
  std::atomic<const std::byte*> lowest{reinterpret_cast<const std::byte*>(UINTPTR_MAX)};
  std::atomic<const std::byte*> highest{nullptr};
  std::atomic<std::uint64_t> edition{new_edition()};  // changes with `live`
  std::size_t made = 0, own_nbytes = 0, shared_nbytes = 0;

  void add(const std::shared_ptr<const Allocation>& allocation) {
    const std::lock_guard lock(mutex);
    live.insert(std::upper_bound(live.begin(), live.end(), allocation,
                                 [](const auto& a, const auto& b) { return a->own() < b->own(); }),
                allocation);
    edition = new_edition();
    if (allocation->own() < lowest) lowest = allocation->own();
    if (allocation->own() + allocation->nbytes > highest) highest = allocation->own() + allocation->nbytes;
    ++made;
    count(*allocation) += allocation->nbytes;
  }
  void remove(const std::shared_ptr<const Allocation>& allocation) noexcept {
    const std::lock_guard lock(mutex);
    live.erase(std::find(live.begin(), live.end(), allocation));
    edition = new_edition();
    count(*allocation) -= allocation->nbytes;
  }
  std::size_t& count(const Allocation& allocation) { return allocation.shared ? shared_nbytes : own_nbytes; }
};

class SymmetricMemory::BufferImpl final : public SymmetricBuffer {
 public:
  BufferImpl(std::shared_ptr<Registry> registry, Allocation allocation)
      : registry_(std::move(registry)), allocation_(std::make_shared<Allocation>(std::move(allocation))) {
    registry_->add(allocation_);
  }
  ~BufferImpl() override { registry_->remove(allocation_); }

  std::byte* data() override { return allocation_->own(); }
  std::byte* peer(int rank) override {
    if (rank < 0 || static_cast<std::size_t>(rank) >= world_size())
      throw InvalidArgument(text("peer(", rank, "): expected a rank in [0, ", world_size(), ")"));
    return allocation_->base(rank);
  }
  std::size_t nbytes() const override { return allocation_->nbytes; }

 private:
  std::size_t world_size() const { return allocation_->bases.size(); }
  std::shared_ptr<Registry> registry_;
  std::shared_ptr<const Allocation> allocation_;
};

SymmetricMemory::SymmetricMemory() : registry_(std::make_shared<Registry>()) {}

std::shared_ptr<SymmetricBuffer> SymmetricMemory::make(net::Mesh& mesh, std::size_t nbytes, bool shared,
                                                       double timeout_s) {
  const std::size_t mapped = std::max<std::size_t>(nbytes, 1);
  const int rank = mesh.rank();
  AllocateHello hello;
  hello.id = next_id_++;
  hello.nbytes = nbytes;
  hello.shared = shared;

  heap::Segment mine;
  net::Parcel parcel;
  if (!shared || rank == 0) {
    try {
      mine = heap::Segment::create(mapped);
      parcel.fd = UniqueFd(::fcntl(mine.fd(), F_DUPFD_CLOEXEC, 0));
      if (!parcel.fd) throw_system_error(errno, "duplicating a segment's descriptor");
    } catch (const SystemError& error) {
      hello.refused = error.code;
    }
  }
  parcel.bytes.resize(sizeof(hello));
  std::memcpy(parcel.bytes.data(), &hello, sizeof(hello));
  std::vector<net::Parcel> parcels = mesh.exchange(std::move(parcel), timeout_s);

  std::string refused_by;
  for (int r = 0; r < mesh.world_size(); ++r) {
    const AllocateHello theirs = read_hello(parcels[static_cast<std::size_t>(r)], hello, r);
    if (theirs.refused != 0)
      refused_by += text(refused_by.empty() ? "" : "; ", "rank ", r, ": ",
                         std::generic_category().message(static_cast<int>(theirs.refused)));
    if (theirs.refused != 0 && hello.refused == 0) hello.refused = theirs.refused;
  }
  if (!refused_by.empty())
    throw AllocationRefused(static_cast<int>(hello.refused),
                            text("allocating ", nbytes, " bytes was refused on ", refused_by));

  Allocation allocation{hello.id, nbytes, rank, shared, {}, {}};
  const auto ranks = static_cast<std::size_t>(mesh.world_size());
  for (std::size_t r = 0; r < (shared ? 1 : ranks); ++r) {
    auto segment = std::make_shared<heap::Segment>(
        static_cast<int>(r) == rank ? std::move(mine) : heap::Segment::map(std::move(parcels[r].fd), mapped));
    allocation.bases.push_back(segment->data());
    allocation.owners.push_back(std::move(segment));
  }
  allocation.bases.resize(ranks, allocation.bases[0]);
  return std::make_shared<BufferImpl>(registry_, std::move(allocation));
}

std::shared_ptr<SymmetricBuffer> SymmetricMemory::keep(std::size_t nbytes, int rank, std::vector<std::byte*> bases,
                                                       std::vector<std::shared_ptr<void>> owners) {
  return std::make_shared<BufferImpl>(registry_,
                                      Allocation{next_id_++, nbytes, rank, false, std::move(bases), std::move(owners)});
}

const Allocation* SymmetricMemory::find(const void* p, std::size_t nbytes) const {
  const auto* begin = static_cast<const std::byte*>(p);
  if (begin < registry_->lowest || begin > registry_->highest) return nullptr;
  // A program uses the same tensors again and again: this thread's last result saves lock and search.
  struct Last {
    std::uint64_t edition = 0;
    const std::byte* begin = nullptr;
    const Allocation* found = nullptr;
  };
  thread_local Last last;
  const auto holds = [=](const Allocation& one, const std::byte* base) {
    const auto offset = static_cast<std::uint64_t>(begin - base);  // huge if it lies before
    return offset <= one.nbytes && nbytes <= one.nbytes - offset;
  };
  if (last.edition == registry_->edition.load(std::memory_order_acquire) && holds(*last.found, last.begin))
    return last.found;
  const std::lock_guard lock(registry_->mutex);
  const auto& live = registry_->live;
  auto after = std::upper_bound(live.begin(), live.end(), begin,
                                [](const std::byte* address, const auto& a) { return address < a->own(); });
  if (after == live.begin()) return nullptr;
  const Allocation* candidate = (--after)->get();
  if (!holds(*candidate, candidate->own())) return nullptr;
  last = {registry_->edition.load(std::memory_order_relaxed), candidate->own(), candidate};
  return candidate;
}

std::shared_ptr<const Allocation> SymmetricMemory::pin(std::uint64_t id) const {
  const std::lock_guard lock(registry_->mutex);
  for (const auto& allocation : registry_->live)
    if (allocation->id == id) return allocation;
  return nullptr;
}

std::shared_ptr<void> SymmetricMemory::account(std::size_t nbytes) {
  const std::lock_guard lock(registry_->mutex);
  registry_->own_nbytes += nbytes;
  ++registry_->made;
  return {registry_.get(), [registry = registry_, nbytes](void*) {
            const std::lock_guard end(registry->mutex);
            registry->own_nbytes -= nbytes;
          }};
}

CommMemory SymmetricMemory::memory() const {
  const std::lock_guard lock(registry_->mutex);
  return {registry_->own_nbytes, registry_->shared_nbytes, 0, registry_->made};
}

}  // namespace zcomm::coll
