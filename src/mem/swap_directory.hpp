// SwapDirectory: a run's private directory: created, locked, recognised when its owner is dead, removed (decision D7).
//
// `<parent>/zcomm-swap-<pid>-<random>` (mode 0700) holds only a lock file, which names the owner: the data file loses
// its name once it is open (data_file.hpp), so a killed process leaves no data. The lock is held with flock from before
// the directory has its name until it is removed; swap_owner.hpp says when it counts as free. The directory is prepared
// under another name (leading dot, trailing .new) and renamed. Safety: all access goes through descriptors (openat,
// O_NOFOLLOW), and only names that this or an earlier version creates are removed, only of our own user. Thread rule:
// one thread at a time.
#pragma once

#include <cstddef>
#include <string>

#include "base/unique_fd.hpp"

namespace zcomm::mem {

class SwapDirectory {
 public:
  /// Creates `parent` if only its last part is missing, removes the directories of dead runs in it, creates our
  /// directory. Throws SystemError (ENOENT, ENOTDIR, EACCES, ENOSPC, ENOLCK) naming the path. `drive` of `drives`:
  /// recorded in the lock file of a striped swap file.
  static SwapDirectory create(const std::string& parent, std::size_t drive = 0, std::size_t drives = 1);

  SwapDirectory(SwapDirectory&&) noexcept = default;
  SwapDirectory& operator=(SwapDirectory&&) = delete;
  ~SwapDirectory() { remove(); }

  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }
  /// Deletes our files and the directory. Idempotent.
  void remove() noexcept;
  /// Closes the descriptors and keeps the directory (a forked child does not own it).
  void disown() noexcept;

 private:
  SwapDirectory() = default;
  UniqueFd parent_, fd_, lock_;
  std::string name_, path_;
};

inline constexpr char kDataName[] = "data";

}  // namespace zcomm::mem
