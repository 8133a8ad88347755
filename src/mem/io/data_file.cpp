#include "mem/io/data_file.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "base/error.hpp"
#include "mem/extents.hpp"

namespace zcomm::mem {
namespace {

constexpr std::uint64_t kChunk = std::uint64_t{64} << 20;
constexpr unsigned kTmpfs = 0x01021994;

std::uint64_t file_size_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  return limit.rlim_cur;
}

std::uint64_t free_nbytes(int fd) {
  struct statvfs info{};
  if (::fstatvfs(fd, &info) != 0) return 0;
  return static_cast<std::uint64_t>(::geteuid() == 0 ? info.f_bfree : info.f_bavail) * info.f_frsize;
}

/// Writes a page and reads it back; 0 or an errno. A full disk, or a limit, is reported by grow().
int try_page(int fd) {
  if (file_size_limit() < kExtentAlign) return 0;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  const std::unique_ptr<void, Free> page(std::aligned_alloc(kExtentAlign, kExtentAlign));
  if (!page) return ENOMEM;
  std::memset(page.get(), 0, kExtentAlign);
  if (::pwrite(fd, page.get(), kExtentAlign, 0) < 0) return errno == ENOSPC || errno == EDQUOT ? 0 : errno;
  return ::pread(fd, page.get(), kExtentAlign, 0) < 0 ? errno : 0;
}

}  // namespace

DataFile::DataFile(int directory, const char* name, std::string path, bool want_direct) : path_(std::move(path)) {
  create(directory, name, want_direct);
  why_named_ = drop_name(directory, name);
  if (why_named_.empty() || ::faccessat(directory, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0) return;
  create(directory, name, want_direct);  // dropping the name also removed the file
}

void DataFile::create(int directory, const char* name, bool want_direct) {
  close();
  is_direct_ = false;
  buffered_.reset(::openat(directory, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!buffered_) throw_system_error(errno, text("SwapFile: cannot create '", path_, "'"), path_);
  if (want_direct) why_buffered_ = try_direct(directory, name);
}

/// Empty if the name is removed and the file works without it, else the reason.
std::string DataFile::drop_name(int directory, const char* name) const {
  if (::unlinkat(directory, name, 0) != 0) return std::strerror(errno);
  struct stat info{};
  int code = ::fstat(fd(), &info) != 0 ? errno : 0;
  if (code == 0) code = try_page(fd());
  return code == 0 ? std::string() : text("the file system keeps no file without a name, ", std::strerror(code));
}

void DataFile::close() noexcept {
  direct_.reset();
  buffered_.reset();
}

/// Empty on success, else the reason.
std::string DataFile::try_direct(int directory, const char* name) {
  struct statfs info{};
  if (::fstatfs(buffered_.get(), &info) != 0) return std::strerror(errno);
  if (static_cast<unsigned>(info.f_type) == kTmpfs) return "tmpfs is memory itself";
#ifdef STATX_DIOALIGN
  struct statx about{};
  if (::statx(buffered_.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &about) == 0 && (about.stx_mask & STATX_DIOALIGN)) {
    if (about.stx_dio_offset_align == 0 || about.stx_dio_offset_align > kExtentAlign) return "the file system has none";
    memory_alignment_ = std::max<std::size_t>(about.stx_dio_mem_align, 1);
  }
#endif
  UniqueFd fd(::openat(directory, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_DIRECT));
  if (!fd) return std::strerror(errno);
  // Some file systems accept the flag and reject the requests.
  if (try_page(fd.get()) == EINVAL) return "the file system refuses such writes";
  direct_ = std::move(fd);
  is_direct_ = true;
  return {};
}

/// Allocates [nbytes_, to); an error leaves the file unchanged. Returns 0 or an errno.
int DataFile::allocate(std::uint64_t to) {
  if (to > file_size_limit()) return EFBIG;
  const int fd = buffered_.get();
  const auto begin = static_cast<off_t>(nbytes_), length = static_cast<off_t>(to - nbytes_);
  int code = 0;
  do code = ::fallocate(fd, 0, begin, length) == 0 ? 0 : errno;
  while (code == EINTR);
  if (code == EOPNOTSUPP || code == ENOSYS) code = ::posix_fallocate(fd, begin, length);  // touches every block
  if (code == 0) {
    nbytes_ = to;
  } else if (::ftruncate(fd, begin) != 0) {
    code = errno;
  }
  return code;
}

void DataFile::grow(std::uint64_t needed) {
  if (needed <= nbytes_) return;
  if (needed > file_size_limit())
    throw_full(
        ENOSPC, needed,
        text("the process's file size limit (RLIMIT_FSIZE, ulimit -f) is ", file_size_limit(), " bytes; raise it"));
  // Checked first, because an attempt would fill the disk for all its users, if only for a moment.
  const std::uint64_t free = free_nbytes(buffered_.get());
  if (needed - nbytes_ > free) throw_full(ENOSPC, needed, "disk full");
  if (nbytes_ > 0 && free / 4 > kChunk && allocate(round_up(needed, kChunk)) == 0) return;
  const int code = allocate(round_up(needed, kExtentAlign));
  if (code == 0) return;
  throw_full(code == EFBIG ? ENOSPC : code, needed, code == EFBIG ? "file too large" : std::strerror(code));
}

void DataFile::throw_full(int code, std::uint64_t needed, const std::string& why) const {
  throw SystemError(code,
                    text("SwapFile: cannot reserve space in ", path_, ": ", needed - nbytes_, " bytes more needed (",
                         needed, " in all), ", free_nbytes(buffered_.get()), " bytes free: ", why),
                    path_);
}

}  // namespace zcomm::mem
