// PinnedArena: anonymous mappings, one per lease (zcomm/pinned_arena.hpp).
#include "zcomm/pinned_arena.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "device/cuda.hpp"

namespace zcomm {

struct PinnedArena::Lease::Shared {
  Options options;
  mutable std::mutex mutex;
  Stats stats{};

  /// Counts `mapped` bytes, or throws while nothing has been mapped yet.
  void charge(std::size_t nbytes, std::size_t mapped) {
    const std::lock_guard lock(mutex);
    const std::size_t budget = options.budget_nbytes.value_or(std::numeric_limits<std::size_t>::max());
    if (stats.used_nbytes > budget || mapped > budget - stats.used_nbytes) refuse(nbytes, mapped, "budget exceeded");
    stats.used_nbytes += mapped;
    stats.peak_nbytes = std::max(stats.peak_nbytes, stats.used_nbytes);
  }

  void discharge(std::size_t mapped, bool locked) noexcept {
    const std::lock_guard lock(mutex);
    stats.used_nbytes -= mapped;
    if (locked) stats.locked_nbytes -= mapped;
  }

  [[noreturn]] void refuse(std::size_t nbytes, std::size_t mapped, const char* why) const {
    const std::string budget = options.budget_nbytes ? text(*options.budget_nbytes, " bytes") : std::string("none");
    throw SystemError(ENOMEM, text("PinnedArena.allocate: ", nbytes, " bytes asked (", mapped, " in whole pages), ",
                                   stats.used_nbytes, " bytes used, budget ", budget, ": ", why));
  }
};

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// Anonymous memory of `mapped` bytes; from 2 MiB up it begins at a huge page and asks for them. nullptr: ENOMEM.
std::byte* map_pages(std::size_t mapped) {
  const bool huge = mapped >= kHugePage;
  const std::size_t span = huge ? mapped + kHugePage : mapped;
  void* got = ::mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) return nullptr;
  auto* data = static_cast<std::byte*>(got);
  if (!huge) return data;
  const std::size_t head = (kHugePage - reinterpret_cast<std::uintptr_t>(data) % kHugePage) % kHugePage;
  if (head > 0) ::munmap(data, head);
  if (head < kHugePage) ::munmap(data + head + mapped, kHugePage - head);
  ::madvise(data + head, mapped, MADV_HUGEPAGE);  // a wish: small pages serve as well
  return data + head;
}

}  // namespace

PinnedArena::Lease::Lease(Lease&& other) noexcept
    : shared_(std::move(other.shared_)),
      data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      mapped_nbytes_(std::exchange(other.mapped_nbytes_, 0)),
      locked_(std::exchange(other.locked_, false)) {}

PinnedArena::Lease& PinnedArena::Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  std::swap(shared_, other.shared_);
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(mapped_nbytes_, other.mapped_nbytes_);
  std::swap(locked_, other.locked_);
  Lease gone(std::move(other));  // what this one held ends here, not whenever `other` does
  return *this;
}

PinnedArena::Lease::~Lease() {
  if (data_ == nullptr) return;
  if (locked_) device::cuda::page_unlock(data_);
  ::munmap(data_, mapped_nbytes_);
  shared_->discharge(mapped_nbytes_, locked_);
}

PinnedArena::PinnedArena() : PinnedArena(Options{}) {}
PinnedArena::PinnedArena(Options options) : shared_(std::make_shared<Lease::Shared>()) { shared_->options = options; }

PinnedArena::Lease PinnedArena::allocate(std::size_t nbytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t limit = std::numeric_limits<std::size_t>::max() / 4;  // keeps every sum below exact
  const std::size_t mapped = nbytes > limit ? limit / page * page : (nbytes + page - 1) / page * page;
  Lease lease;
  lease.shared_ = shared_;
  if (nbytes > 0) {
    shared_->charge(nbytes, mapped);
    lease.data_ = map_pages(mapped);
    if (lease.data_ == nullptr) {
      shared_->discharge(mapped, false);
      const std::lock_guard lock(shared_->mutex);
      shared_->refuse(nbytes, mapped, "the system has no memory for it");
    }
    lease.nbytes_ = nbytes;
    lease.mapped_nbytes_ = mapped;
    if (shared_->options.page_lock) lease.locked_ = device::cuda::page_lock(lease.data_, mapped);
  }
  const std::lock_guard lock(shared_->mutex);
  shared_->stats.allocation_count += 1;
  if (lease.locked_) shared_->stats.locked_nbytes += mapped;
  return lease;
}

PinnedArena::Stats PinnedArena::stats() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->stats;
}

}  // namespace zcomm
