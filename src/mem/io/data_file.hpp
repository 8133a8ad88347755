// DataFile: the file that holds the extents: direct I/O if the file system supports it, preallocated, grown by chunks.
//
// Once open, the file has no name, if the file system can keep such a file: the space is freed when the last descriptor
// is closed, by close(), the process's end or a kill. Invariant: bytes below nbytes() are allocated on disk.
// RLIMIT_FSIZE is checked before the file grows, because exceeding it would kill the process (SIGXFSZ). Thread rule:
// the owner's lock; fd() may be used by the I/O thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/unique_fd.hpp"

namespace zcomm::mem {

class DataFile {
 public:
  /// Creates `name` (mode 0600) in the directory, and removes the name. Throws SystemError.
  DataFile(int directory, const char* name, std::string path, bool want_direct);

  /// Allocates at least `needed` bytes. Throws SystemError ENOSPC (EDQUOT) naming path, bytes needed, bytes free.
  void grow(std::uint64_t needed);

  int buffered_fd() const { return buffered_.get(); }
  int fd() const { return direct_ ? direct_.get() : buffered_.get(); }
  bool direct() const { return is_direct_; }
  std::size_t alignment() const { return direct() ? 4096 : 1; }  ///< of offsets and lengths
  std::size_t memory_alignment() const { return direct() ? memory_alignment_ : 1; }
  std::uint64_t nbytes() const { return nbytes_; }
  /// The name under which it was opened.
  const std::string& path() const { return path_; }
  /// Why direct I/O was requested but is unavailable; empty otherwise.
  const std::string& why_buffered() const { return why_buffered_; }
  /// Why the file still has its name; empty if it has none.
  const std::string& why_named() const { return why_named_; }
  /// Closes the descriptors, which frees the space of a file without a name. Idempotent.
  void close() noexcept;

 private:
  void create(int directory, const char* name, bool want_direct);
  std::string drop_name(int directory, const char* name) const;
  std::string try_direct(int directory, const char* name);
  int allocate(std::uint64_t to);
  [[noreturn]] void throw_full(int code, std::uint64_t needed, const std::string& why) const;

  std::string path_, why_buffered_, why_named_;
  UniqueFd buffered_, direct_;
  bool is_direct_ = false;
  std::size_t memory_alignment_ = 4096;
  std::uint64_t nbytes_ = 0;
};

}  // namespace zcomm::mem
