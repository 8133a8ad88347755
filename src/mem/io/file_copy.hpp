// FileCopy: ranges of a file into a new one, by the kernel if possible: shared blocks (reflink), copy_file_range, or
// reads and writes of a small buffer.
//
// Invariant: the copy outside of the ranges is a hole, or (reflink) the source's data; a `durable` file is on disk
// (fsync) when the call returns; copy_file() removes its file when it throws. Thread rule: one thread; the source is
// not written to meanwhile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"

namespace zcomm::mem {

struct Range {
  std::uint64_t offset, nbytes;
};

/// The method by which the bytes were copied.
enum class CopyMethod { reflink, copy_file_range, read_write };
const char* name_of(CopyMethod method);

struct CopySource {
  int fd;
  const std::string& path;
};

/// Creates `path` (mode 0600; must not exist) with the ranges of the source at the same offsets, `nbytes` long.
/// `best`: the first method to try, for tests. Throws SystemError naming the path of the side that failed.
CopyMethod copy_file(CopySource source, const std::string& path, const std::vector<Range>& ranges, std::uint64_t nbytes,
                     bool durable = true, CopyMethod best = CopyMethod::reflink);

/// The same into an open empty file; `path` names it in errors.
CopyMethod copy_into(int file, const std::string& path, CopySource source, const std::vector<Range>& ranges,
                     std::uint64_t nbytes, bool durable, CopyMethod best = CopyMethod::reflink);

/// Creates a file (mode 0600) in `directory` and removes its name `name` again; `path` names it in errors. Throws
/// SystemError (EEXIST, ENOENT).
UniqueFd make_nameless(int directory, const char* name, const std::string& path);

}  // namespace zcomm::mem
