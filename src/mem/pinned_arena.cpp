// PinnedArena: anonymous mappings, one per lease (zcomm/pinned_arena.hpp).
#include "zcomm/pinned_arena.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "device/cuda/cuda.hpp"

namespace zcomm {

namespace {

/// Total of all arenas; never destroyed, because leases may outlive everything.
std::atomic<std::size_t>& process_used() {
  static auto* used = new std::atomic<std::size_t>(0);
  return *used;
}

std::atomic<std::size_t>& process_peak() {
  static auto* peak = new std::atomic<std::size_t>(0);
  return *peak;
}

std::string words(std::optional<std::size_t> budget) { return budget ? text(*budget, " bytes") : std::string("none"); }

std::string memlock_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return text(limit.rlim_cur, " bytes");
}

}  // namespace

struct PinnedArena::Lease::Shared {
  Options options;
  std::optional<std::size_t> process_budget;
  mutable std::mutex mutex;
  Stats stats{};

  /// Charges `mapped` bytes, or throws before anything has been mapped.
  void charge(std::size_t nbytes, std::size_t mapped) {
    const std::lock_guard lock(mutex);
    if (!fits(stats.used_nbytes, mapped, options.budget_nbytes)) refuse(nbytes, mapped, "budget exceeded");
    std::atomic<std::size_t>& used = process_used();
    std::size_t before = used.load();
    do {
      if (!fits(before, mapped, process_budget)) refuse(nbytes, mapped, "the process's budget is exceeded");
    } while (!used.compare_exchange_weak(before, before + mapped));
    stats.used_nbytes += mapped;
  }

  /// The charged memory is allocated; only now it counts for the high-water marks.
  void granted(std::size_t locked) {
    const std::lock_guard lock(mutex);
    stats.allocation_count += 1;
    stats.locked_nbytes += locked;
    stats.peak_nbytes = std::max(stats.peak_nbytes, stats.used_nbytes);
    const std::size_t used = process_used().load();
    std::size_t peak = process_peak().load();
    while (peak < used && !process_peak().compare_exchange_weak(peak, used)) {
    }
  }

  void discharge(std::size_t mapped, bool locked) noexcept {
    const std::lock_guard lock(mutex);
    process_used() -= mapped;
    stats.used_nbytes -= mapped;
    if (locked) stats.locked_nbytes -= mapped;
  }

  static bool fits(std::size_t used, std::size_t more, std::optional<std::size_t> budget) {
    const std::size_t most = budget.value_or(std::numeric_limits<std::size_t>::max());
    return used <= most && more <= most - used;
  }

  [[noreturn]] void refuse(std::size_t nbytes, std::size_t mapped, const char* why) const {
    throw SystemError(ENOMEM, text("PinnedArena.allocate: ", nbytes, " bytes asked (", mapped, " in whole pages), ",
                                   stats.used_nbytes, " bytes used, budget ", words(options.budget_nbytes),
                                   "; all arenas ", process_used().load(), " bytes, ZCOMM_PINNED_BUDGET ",
                                   words(process_budget), "; RLIMIT_MEMLOCK (ulimit -l) ", memlock_limit(), ": ", why));
  }
};

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// Anonymous memory of `mapped` bytes; from 2 MiB up it begins at a huge page and requests huge pages. nullptr: ENOMEM.
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
  ::madvise(data + head, mapped, MADV_HUGEPAGE);  // a hint: small pages also work
  return data + head;
}

}  // namespace

PinnedArena::Lease::Lease(Lease&& other) noexcept
    : shared_(std::move(other.shared_)),
      data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      mapped_nbytes_(std::exchange(other.mapped_nbytes_, 0)),
      lock_(std::exchange(other.lock_, Lock::none)) {}

PinnedArena::Lease& PinnedArena::Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  std::swap(shared_, other.shared_);
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(mapped_nbytes_, other.mapped_nbytes_);
  std::swap(lock_, other.lock_);
  Lease gone(std::move(other));  // frees this lease's memory here, not whenever `other` ends
  return *this;
}

void PinnedArena::Lease::check_whole(std::size_t element_nbytes) const {
  if (nbytes_ % element_nbytes != 0)
    throw InvalidArgument(text("PinnedArena: a lease of ", nbytes_, " bytes has no whole number of elements of ",
                               element_nbytes, " bytes"));
}

PinnedArena::Lease::~Lease() {
  if (data_ == nullptr) return;
  if (lock_ == Lock::cuda) device::cuda::page_unlock(data_);
  ::munmap(data_, mapped_nbytes_);  // ends an mlock, too
  shared_->discharge(mapped_nbytes_, lock_ != Lock::none);
}

PinnedArena::PinnedArena() : PinnedArena(Options{}) {}
PinnedArena::PinnedArena(Options options) : shared_(std::make_shared<Lease::Shared>()) {
  shared_->options = options;
  shared_->process_budget = read_env().pinned_budget;
}

/// Locks as the options say. Returns the reason of a refusal, or nothing.
std::string PinnedArena::lock_pages(Lease& lease) {
  try {
    if (shared_->options.page_lock && device::cuda::page_lock(lease.data_, lease.mapped_nbytes_))
      lease.lock_ = Lease::Lock::cuda;
  } catch (const device::cuda::PageLockRefused& error) {
    return error.what();
  }
  if (lease.lock_ != Lease::Lock::none || !shared_->options.keep_resident) return {};
  if (::mlock(lease.data_, lease.mapped_nbytes_) != 0) return text("mlock: ", std::strerror(errno));
  lease.lock_ = Lease::Lock::memory;
  return {};
}

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
    if (const std::string refusal = lock_pages(lease); !refusal.empty()) {
      const std::lock_guard lock(shared_->mutex);
      shared_->refuse(nbytes, mapped, refusal.c_str());
    }
  }
  shared_->granted(lease.lock_ != Lease::Lock::none ? mapped : 0);
  return lease;
}

PinnedArena::Stats PinnedArena::stats() const {
  const std::lock_guard lock(shared_->mutex);
  Stats stats = shared_->stats;
  stats.process_nbytes = process_used().load();
  stats.process_peak_nbytes = process_peak().load();
  return stats;
}

}  // namespace zcomm
