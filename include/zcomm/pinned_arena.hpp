// PinnedArena: exact-size host memory for staging and offloaded state.
//
// Page aligned, huge pages if the kernel grants them, page-locked if CUDA is available (or on request); exceeding the
// budget of the arena or of the process is an error and not a crash; every byte is counted. A Lease returns its memory
// when dropped and may outlive the arena's handle. Pages are placed near the thread that touches them first (the
// kernel's default, or the policy of numactl), so a rank that is bound to a node has its memory there. Thread rule:
// free-threaded.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>

namespace zcomm {

class PinnedArena {
 public:
  struct Options {
    std::optional<std::size_t> budget_nbytes;  ///< of this arena; none: only the process's (ZCOMM_PINNED_BUDGET)
    bool page_lock = true;                     ///< only if CUDA is available
    bool keep_resident = false;                ///< never paged out: mlock if CUDA does not lock; an error if refused
  };
  struct Stats {
    std::size_t used_nbytes;
    std::size_t peak_nbytes;
    std::size_t locked_nbytes;   ///< by CUDA or mlock
    std::size_t process_nbytes;  ///< used by all arenas of the process
    std::size_t process_peak_nbytes;
    std::size_t allocation_count;  ///< allocations so far; constant in the steady state
  };
  /// Memory that is freed when destroyed; move-only.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();
    std::byte* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }
    /// All of it as elements; throws InvalidArgument if nbytes() is not a multiple of their size.
    template <class T>
    std::span<T> as() const {
      static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 4096);
      check_whole(sizeof(T));
      return {reinterpret_cast<T*>(data_), nbytes_ / sizeof(T)};
    }

   private:
    void check_whole(std::size_t element_nbytes) const;

    friend class PinnedArena;
    struct Shared;
    std::shared_ptr<Shared> shared_;
    std::byte* data_ = nullptr;
    std::size_t nbytes_ = 0;
    std::size_t mapped_nbytes_ = 0;
    enum class Lock { none, cuda, memory } lock_ = Lock::none;
  };

  PinnedArena();
  explicit PinnedArena(Options options);
  /// Zero-filled. Throws SystemError ENOMEM naming the request, the bytes in use, both budgets and RLIMIT_MEMLOCK.
  Lease allocate(std::size_t nbytes);
  Stats stats() const;

 private:
  std::string lock_pages(Lease& lease);
  std::shared_ptr<Lease::Shared> shared_;
};

}  // namespace zcomm
