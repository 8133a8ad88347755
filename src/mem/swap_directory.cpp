#include "mem/swap_directory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string_view>

#include "base/error.hpp"
#include "zcomm/swap_file.hpp"

namespace zcomm::mem {
namespace {

constexpr std::string_view kPrefix = "zcomm-swap-";
constexpr std::string_view kNewPrefix = ".zcomm-swap-";
constexpr std::string_view kNewSuffix = ".new";
constexpr char kLockName[] = "lock";
constexpr char kManifestName[] = "manifest.json";
constexpr time_t kUnfinishedAge_s = 60;  // a directory is prepared within milliseconds

/// Digits, '-', 16 hex digits: what follows the prefix in a name of ours.
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

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string host(name.data());
  std::erase_if(host, [](char c) { return c < ' ' || c == '"' || c == '\\'; });
  return host;
}

std::string host_field() { return text("\"host\": \"", host_name(), "\""); }

/// Clock ticks after boot at which this process began: with the pid it names a process for good.
std::string start_ticks() {
  std::ifstream stat("/proc/self/stat");
  const std::string line((std::istreambuf_iterator<char>(stat)), {});
  const std::size_t name_end = line.rfind(')');  // the name in front may hold anything
  if (name_end == std::string::npos) return "0";
  std::istringstream fields(line.substr(name_end + 1));
  std::string field = "0";
  for (int i = 3; i <= 22; ++i) fields >> field;
  return field;
}

std::string manifest(std::size_t drive, std::size_t drives) {
  const time_t now = ::time(nullptr);
  tm utc{};
  ::gmtime_r(&now, &utc);
  std::array<char, 32> created{};
  ::strftime(created.data(), created.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text("{\"format\": \"zcomm-swap 1\", \"pid\": ", ::getpid(), ", \"start_ticks\": ", start_ticks(), ", ",
              host_field(), ", \"uid\": ", ::getuid(), ", \"created\": \"", created.data(), "\", \"drive\": ", drive,
              ", \"drives\": ", drives, "}\n");
}

bool on_network(int fd) {
  struct statfs info{};
  if (::fstatfs(fd, &info) != 0) return true;
  constexpr unsigned kNfs = 0x6969, kCifs = 0xFF534D42, kSmb2 = 0xFE534D42, kLustre = 0x0BD00BD0, kCeph = 0x00C36400,
                     kGpfs = 0x47504653, kFuse = 0x65735546;
  const auto type = static_cast<unsigned>(info.f_type);
  return type == kNfs || type == kCifs || type == kSmb2 || type == kLustre || type == kCeph || type == kGpfs ||
         type == kFuse;
}

bool made_on_this_host(int directory) {
  const UniqueFd file(::openat(directory, kManifestName, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  std::array<char, 1024> content{};
  const ssize_t got = file ? ::read(file.get(), content.data(), content.size()) : -1;
  return got > 0 &&
         std::string_view(content.data(), static_cast<std::size_t>(got)).find(host_field()) != std::string_view::npos;
}

bool is_regular(int fd) {
  struct stat info{};
  return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

/// Removes our files, then the directory if nothing else is in it.
void remove_known(int parent, const char* name, int directory) noexcept {
  for (const char* file : {kDataName, SwapFile::kCopyName, kManifestName, kLockName}) ::unlinkat(directory, file, 0);
  ::unlinkat(parent, name, AT_REMOVEDIR);
}

void remove_if_stale(int parent, const char* name, bool finished) {
  const UniqueFd directory(::openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat info{};
  if (!directory || ::fstat(directory.get(), &info) != 0 || info.st_uid != ::geteuid()) return;
  if (!finished && ::time(nullptr) - info.st_mtime < kUnfinishedAge_s) return;  // perhaps being made right now
  if (finished && on_network(directory.get()) && !made_on_this_host(directory.get())) return;
  const UniqueFd lock(::openat(directory.get(), kLockName, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!lock) {
    // The lock goes last, so an owner that died while removing leaves an empty directory; a full one is not ours.
    if (errno == ENOENT) ::unlinkat(parent, name, AT_REMOVEDIR);
    return;
  }
  if (!is_regular(lock.get()) || ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) return;
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
  // For the caller "read-only file system" is "not writable": one error to handle.
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
  std::random_device device;
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "%d-%08x%08x", static_cast<int>(::getpid()), device(), device());
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
  const UniqueFd file(::openat(made.fd_.get(), kManifestName, kCreate, 0600));
  const std::string content = manifest(drive, drives);
  check(file && ::write(file.get(), content.data(), content.size()) == static_cast<ssize_t>(content.size()),
        "write the manifest of");
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
