// SwapDirectory: a run's private directory: made, locked, recognised when its owner is dead, removed (decision D7).
//
// `<parent>/zcomm-swap-<pid>-<random>` (mode 0700) holds a lock file, which names the owner, and nothing else: the data
// file loses its name when it has been opened (data_file.hpp), so a process that is killed leaves no data. The lock is
// held with flock from before the directory has its name until it is gone; when it counts as free, see swap_owner.hpp.
// The directory is prepared under another name (leading dot, trailing .new) and renamed. Safety: everything goes
// through descriptors (openat, O_NOFOLLOW), only names that this or an earlier version makes are removed, and only of
// our own user. Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <string>

#include "base/unique_fd.hpp"

namespace zcomm::mem {

class SwapDirectory {
 public:
  /// Creates `parent` if only its last part is missing, removes what dead runs left there, makes our directory.
  /// Throws SystemError (ENOENT, ENOTDIR, EACCES, ENOSPC, ENOLCK) naming the path.
  /// `drive` of `drives`: what the lock file says of a striped swap file.
  static SwapDirectory create(const std::string& parent, std::size_t drive = 0, std::size_t drives = 1);

  SwapDirectory(SwapDirectory&&) noexcept = default;
  SwapDirectory& operator=(SwapDirectory&&) = delete;
  ~SwapDirectory() { remove(); }

  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }
  /// Deletes the directory and what we put in it. Idempotent.
  void remove() noexcept;
  /// Closes the descriptors and leaves the directory alone (a forked child does not own it).
  void disown() noexcept;

 private:
  SwapDirectory() = default;
  UniqueFd parent_, fd_, lock_;
  std::string name_, path_;
};

inline constexpr char kDataName[] = "data";

}  // namespace zcomm::mem
