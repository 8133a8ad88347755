// SwapDrives: one directory and one data file on each drive of a swap file.
//
// Invariant: all of them exist, or none: a failed constructor removes its directories and files. Thread rule: the
// owner's lock; descriptors may be used by the I/O thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mem/io/data_file.hpp"
#include "mem/swap_directory.hpp"

namespace zcomm::mem {

class SwapDrives {
 public:
  /// Throws SystemError naming the path; InvalidArgument when two of `parents` are the same directory.
  SwapDrives(const std::vector<std::string>& parents, bool direct);

  std::size_t count() const { return files_.size(); }
  const DataFile& file(std::size_t drive) const { return *files_[drive]; }
  const SwapDirectory& directory(std::size_t drive) const { return directories_[drive]; }
  /// Allocates at least `needed` bytes on that drive. Throws SystemError (ENOSPC).
  void grow(std::size_t drive, std::uint64_t needed) { files_[drive]->grow(needed); }

  bool direct() const;                   ///< all of them
  std::size_t alignment() const;         ///< of offsets and lengths; the strictest drive's
  std::size_t memory_alignment() const;  ///< the strictest drive's
  std::uint64_t nbytes() const;          ///< of all files
  std::vector<std::string> paths() const;
  /// Closes the files, which frees their space, and removes the directories. Idempotent.
  void remove() noexcept;
  /// After fork: keeps directories and files.
  void disown() noexcept;

 private:
  std::vector<SwapDirectory> directories_;
  std::vector<std::unique_ptr<DataFile>> files_;
};

}  // namespace zcomm::mem
