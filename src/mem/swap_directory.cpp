#include "mem/swap_directory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string_view>

#include "base/error.hpp"
#include "mem/swap_owner.hpp"
#include "zcomm/swap_file.hpp"

namespace zcomm::mem {
namespace {

constexpr std::string_view kPrefix = "zcomm-swap-";
constexpr std::string_view kNewPrefix = ".zcomm-swap-";
constexpr std::string_view kNewSuffix = ".new";
constexpr char kLockName[] = "lock";
constexpr char kOldRecordName[] = "manifest.json";  // of earlier versions
constexpr time_t kUnfinishedAge_s = 60;             // a directory is prepared within milliseconds

/// Digits, '-', 16 hex digits: the rest of our names after the prefix.
bool is_pid_and_random(std::string_view rest) {
  const std::size_t dash = rest.find('-');
  if (dash == 0 || dash == std::string_view::npos || rest.size() != dash + 17) return false;
  const auto in = [](std::string_view allowed) {
    return [allowed](char c) { return allowed.find(c) != std::string_view::npos; };
  };
  return std::all_of(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(dash), in("0123456789")) &&
         std::all_of(rest.begin() + static_cast<std::ptrdiff_t>(dash) + 1, rest.end(), in("0123456789abcdef"));
}

bool is_finished_name(std::string_view name) {
  return name.starts_with(kPrefix) && is_pid_and_random(name.substr(kPrefix.size()));
}

bool is_unfinished_name(std::string_view name) {
  if (!name.starts_with(kNewPrefix) || !name.ends_with(kNewSuffix)) return false;
  name.remove_suffix(kNewSuffix.size());
  return is_pid_and_random(name.substr(kNewPrefix.size()));
}

/// At most 1 KiB; empty if it cannot be read.
std::string content_of(int fd) {
  std::array<char, 1024> content{};
  const ssize_t got = fd < 0 ? -1 : ::pread(fd, content.data(), content.size(), 0);
  return got > 0 ? std::string(content.data(), static_cast<std::size_t>(got)) : std::string();
}

/// Returns the owner's record. Earlier versions kept it in a file of its own.
std::string record_in(int directory, int lock) {
  std::string record = content_of(lock);
  if (!record.empty()) return record;
  const UniqueFd file(::openat(directory, kOldRecordName, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  return content_of(file.get());
}

bool is_regular(int fd) {
  struct stat info{};
  return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

/// Removes our files, then the directory if nothing else is in it.
void remove_known(int parent, const char* name, int directory) noexcept {
  for (const char* file : {kDataName, SwapFile::kCopyName, kOldRecordName, kLockName}) ::unlinkat(directory, file, 0);
  ::unlinkat(parent, name, AT_REMOVEDIR);
}

void remove_if_stale(int parent, const char* name, bool finished) {
  const UniqueFd directory(::openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat info{};
  if (!directory || ::fstat(directory.get(), &info) != 0 || info.st_uid != ::geteuid()) return;
  if (!finished && ::time(nullptr) - info.st_mtime < kUnfinishedAge_s) return;  // it may be in preparation
  const UniqueFd lock(::openat(directory.get(), kLockName, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!lock) {
    // The lock is removed last, so an owner that died while removing leaves an empty directory; a full one is not ours.
    if (errno == ENOENT) ::unlinkat(parent, name, AT_REMOVEDIR);
    return;
  }
  if (!is_regular(lock.get()) || ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) return;
  if (!locks_are_proof(directory.get()) && !owner_is_gone(record_in(directory.get(), lock.get()))) return;
  remove_known(parent, name, directory.get());
}

void remove_stale(int parent) {
  const int copy = ::openat(parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return;
  const auto close_stream = [](DIR* stream) { ::closedir(stream); };
  const std::unique_ptr<DIR, decltype(close_stream)> stream(::fdopendir(copy), close_stream);
  if (!stream) {
    ::close(copy);
    return;
  }
  while (const dirent* each = ::readdir(stream.get())) {
    const bool finished = is_finished_name(each->d_name);
    if (finished || is_unfinished_name(each->d_name)) remove_if_stale(parent, each->d_name, finished);
  }
}

[[noreturn]] void throw_path_error(int code, const std::string& what, const std::string& path) {
  // To the caller "read-only file system" means "not writable": one error to handle.
  if (code == EROFS) throw SystemError(EACCES, text(what, " '", path, "': read-only file system"), path);
  throw_system_error(code, text(what, " '", path, "'"), path);
}

UniqueFd open_parent(const std::string& parent) {
  if (parent.empty()) throw SystemError(ENOENT, "SwapFile: the directory is an empty string");
  if (::mkdir(parent.c_str(), 0700) != 0 && errno != EEXIST) {
    const int code = errno;
    if (::access(parent.c_str(), F_OK) != 0) throw_path_error(code, "SwapFile: cannot create directory", parent);
  }
  UniqueFd fd(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw_path_error(errno, "SwapFile: cannot open directory", parent);
  return fd;
}

std::string random_name() {
  std::uint64_t random = 0;  // std::random_device of GCC 12 needs glibc 2.36
  if (::getentropy(&random, sizeof random) != 0) throw SystemError(errno, "SwapFile: no random numbers");
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "%d-%016" PRIx64, static_cast<int>(::getpid()), random);
  return name.data();
}

}  // namespace

SwapDirectory SwapDirectory::create(const std::string& parent, std::size_t drive, std::size_t drives) {
  SwapDirectory made;
  made.parent_ = open_parent(parent);
  const int at = made.parent_.get();
  remove_stale(at);
  const std::string unique = random_name();
  const std::string final_name = text(kPrefix, unique);
  const std::string path = text(parent, parent.ends_with('/') ? "" : "/", final_name);
  const std::string preparing = text(kNewPrefix, unique, kNewSuffix);
  const auto check = [&path](bool good, const char* what) {
    if (!good) throw_path_error(errno, text("SwapFile: cannot ", what), path);
  };
  check(::mkdirat(at, preparing.c_str(), 0700) == 0, "create directory");
  made.name_ = preparing;  // from here on the destructor removes it
  made.fd_.reset(::openat(at, preparing.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  check(static_cast<bool>(made.fd_), "open directory");
  check(::fchmod(made.fd_.get(), 0700) == 0, "set the mode of");
  constexpr int kCreate = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  made.lock_.reset(::openat(made.fd_.get(), kLockName, kCreate, 0600));
  check(static_cast<bool>(made.lock_), "create the lock of");
  check(::flock(made.lock_.get(), LOCK_EX | LOCK_NB) == 0, "lock (a file system with flock is needed)");
  const std::string record = owner_record(drive, drives);
  errno = ENOSPC;  // for a short write, which sets no errno
  check(::write(made.lock_.get(), record.data(), record.size()) == static_cast<ssize_t>(record.size()),
        "write the lock of");
  check(::renameat(at, preparing.c_str(), at, final_name.c_str()) == 0, "rename");
  made.name_ = final_name;
  made.path_ = path;
  return made;
}

void SwapDirectory::remove() noexcept {
  if (parent_ && !name_.empty()) remove_known(parent_.get(), name_.c_str(), fd_.get());
  disown();
}

void SwapDirectory::disown() noexcept {
  name_.clear();
  lock_.reset();
  fd_.reset();
  parent_.reset();
}

}  // namespace zcomm::mem
