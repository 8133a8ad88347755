#include "mem/io/file_copy.hpp"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <memory>

#include "base/error.hpp"

namespace zcomm::mem {
namespace {

constexpr std::uint64_t kPiece = std::uint64_t{16} << 20;  // then the page cache may drop it
constexpr std::size_t kBuffer = std::size_t{1} << 20;

struct Sides {
  int from, to;
  const std::string &from_path, &to_path;
};

[[noreturn]] void throw_failed(const char* what, const std::string& path) {
  throw_system_error(errno, text("SwapFile.snapshot: cannot ", what, " '", path, "'"), path);
}

[[noreturn]] void throw_short(const Sides& sides, std::uint64_t offset) {
  throw DataCorrupt(EIO, text("SwapFile.snapshot: unexpected end of file at offset ", offset, " of ", sides.from_path),
                    sides.from_path);
}

/// The kernel cannot copy this way between these two files; any other error is real.
bool unable(int code) {
  return code == EXDEV || code == EINVAL || code == EOPNOTSUPP || code == ENOSYS || code == ENOTTY || code == EPERM;
}

void read_write(const Sides& sides, Range range) {
  const auto buffer = std::make_unique<std::byte[]>(kBuffer);
  while (range.nbytes > 0) {
    const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(range.nbytes, kBuffer));
    const ssize_t got = ::pread(sides.from, buffer.get(), wanted, static_cast<off_t>(range.offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_failed("read", sides.from_path);
    if (got == 0) throw_short(sides, range.offset);
    for (ssize_t done = 0; done < got;) {
      const ssize_t put = ::pwrite(sides.to, buffer.get() + done, static_cast<std::size_t>(got - done),
                                   static_cast<off_t>(range.offset) + done);
      if (put < 0 && errno == EINTR) continue;
      if (put == 0) errno = EIO;  // it might repeat for ever
      if (put <= 0) throw_failed("write", sides.to_path);
      done += put;
    }
    range.offset += static_cast<std::uint64_t>(got);
    range.nbytes -= static_cast<std::uint64_t>(got);
  }
}

/// False: the kernel cannot, and nothing was copied.
bool copy_range(const Sides& sides, Range range) {
  bool begun = false;
  while (range.nbytes > 0) {
    auto from = static_cast<off_t>(range.offset), to = from;
    const ssize_t got = ::copy_file_range(sides.from, &from, sides.to, &to, range.nbytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && !begun && unable(errno)) return false;
    if (got < 0) throw_failed("copy into", sides.to_path);
    if (got == 0) throw_short(sides, range.offset);
    begun = true;
    range.offset += static_cast<std::uint64_t>(got);
    range.nbytes -= static_cast<std::uint64_t>(got);
  }
  return true;
}

CopyMethod copy_ranges(const Sides& sides, const std::vector<Range>& ranges, CopyMethod method) {
  for (const Range& range : ranges) {
    for (std::uint64_t done = 0; done < range.nbytes; done += kPiece) {
      const Range piece{range.offset + done, std::min(kPiece, range.nbytes - done)};
      if (method == CopyMethod::copy_file_range && !copy_range(sides, piece)) method = CopyMethod::read_write;
      if (method == CopyMethod::read_write) read_write(sides, piece);
      // Written back while the next piece is copied, so that a snapshot does not fill the page cache.
      const auto begin = static_cast<off_t>(piece.offset), length = static_cast<off_t>(piece.nbytes);
      ::sync_file_range(sides.to, begin, length, SYNC_FILE_RANGE_WRITE);
      ::posix_fadvise(sides.from, begin, length, POSIX_FADV_DONTNEED);
    }
  }
  return method;
}

}  // namespace

const char* name_of(CopyMethod method) {
  constexpr std::array names{"reflink", "copy_file_range", "read_write"};
  return names[static_cast<std::size_t>(method)];
}

CopyMethod copy_into(int file, const std::string& path, CopySource source, const std::vector<Range>& ranges,
                     std::uint64_t nbytes, bool durable, CopyMethod best) {
  const Sides sides{source.fd, file, source.path, path};
  CopyMethod method = best;
  if (method == CopyMethod::reflink && (nbytes == 0 || ::ioctl(file, FICLONE, source.fd) != 0))
    method = CopyMethod::copy_file_range;
  if (method != CopyMethod::reflink) method = copy_ranges(sides, ranges, method);
  if (::ftruncate(file, static_cast<off_t>(nbytes)) != 0) throw_failed("set the size of", path);
  if (durable && ::fsync(file) != 0) throw_failed("sync", path);
  ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  return method;
}

CopyMethod copy_file(CopySource source, const std::string& path, const std::vector<Range>& ranges, std::uint64_t nbytes,
                     bool durable, CopyMethod best) {
  const UniqueFd made(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!made) throw_failed("create", path);
  try {
    return copy_into(made.get(), path, source, ranges, nbytes, durable, best);
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

UniqueFd make_nameless(int directory, const char* name, const std::string& path) {
  UniqueFd made(::openat(directory, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!made) throw_failed("create", path);
  if (::unlinkat(directory, name, 0) != 0) throw_failed("take the name of", path);
  return made;
}

}  // namespace zcomm::mem
