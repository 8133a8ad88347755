// PinnedArena: exact-size host memory for staging and offloaded state.
//
// Page aligned, huge pages where the kernel grants them, page-locked where CUDA is there; a budget that is an error
// and not a crash; every byte is counted. A Lease returns its memory when dropped and may outlive the arena's handle.
// Thread rule: free-threaded.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

namespace zcomm {

class PinnedArena {
 public:
  struct Options {
    std::optional<std::size_t> budget_nbytes;  ///< none: no limit of ours
    bool page_lock = true;                     ///< only where CUDA is available
  };
  struct Stats {
    std::size_t used_nbytes;
    std::size_t peak_nbytes;
    std::size_t locked_nbytes;
    std::size_t allocation_count;  ///< ever made; constant in the steady state
  };
  /// Memory that returns to the system when destroyed; move-only.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();
    std::byte* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

   private:
    friend class PinnedArena;
    struct Shared;
    std::shared_ptr<Shared> shared_;
    std::byte* data_ = nullptr;
    std::size_t nbytes_ = 0;
    std::size_t mapped_nbytes_ = 0;
    bool locked_ = false;
  };

  PinnedArena();
  explicit PinnedArena(Options options);
  /// Zero-filled. Throws SystemError ENOMEM naming the request, what is used and the budget.
  Lease allocate(std::size_t nbytes);
  Stats stats() const;

 private:
  std::shared_ptr<Lease::Shared> shared_;
};

}  // namespace zcomm
