#include "mem/swap_owner.hpp"

#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>

#include "base/error.hpp"

namespace zcomm::mem {
namespace {

/// The value of `"name": value` or `"name": "value"`; empty if there is none.
std::string field(const std::string& record, std::string_view name) {
  const std::string key = text('"', name, "\": ");
  const std::size_t found = record.find(key);
  if (found == std::string::npos) return {};
  std::size_t begin = found + key.size();
  const bool quoted = begin < record.size() && record[begin] == '"';
  if (quoted) ++begin;
  const std::size_t end = record.find_first_of(quoted ? "\"" : ",}", begin);
  return end == std::string::npos ? std::string() : record.substr(begin, end - begin);
}

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string host(name.data());
  std::erase_if(host, [](char c) { return c < ' ' || c == '"' || c == '\\'; });
  return host;
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

std::string pid_namespace() {
  struct stat info{};
  return ::stat("/proc/self/ns/pid", &info) == 0 ? std::to_string(info.st_ino) : std::string();
}

/// Clock ticks after boot at which the process began: together with the pid a unique name. Empty: it has ended.
std::string start_ticks(const std::string& pid) {
  std::ifstream stat("/proc/" + pid + "/stat");
  const std::string line((std::istreambuf_iterator<char>(stat)), {});
  const std::size_t name_end = line.rfind(')');  // the name before it may contain anything
  if (name_end == std::string::npos) return {};
  std::istringstream fields(line.substr(name_end + 1));
  std::string value;
  for (int i = 3; i <= 22; ++i) fields >> value;
  return value;
}

std::string now_utc() {
  const time_t now = ::time(nullptr);
  tm utc{};
  ::gmtime_r(&now, &utc);
  std::array<char, 32> shown{};
  ::strftime(shown.data(), shown.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return shown.data();
}

}  // namespace

std::string owner_record(std::size_t drive, std::size_t drives) {
  const std::string ticks = start_ticks("self"), space = pid_namespace();
  return text("{\"format\": \"zcomm-swap 2\", \"pid\": ", ::getpid(),
              ", \"start_ticks\": ", ticks.empty() ? "0" : ticks, ", \"pid_namespace\": ", space.empty() ? "0" : space,
              ", \"boot_id\": \"", boot_id(), "\", \"host\": \"", host_name(), "\", \"uid\": ", ::getuid(),
              ", \"created\": \"", now_utc(), "\", \"drive\": ", drive, ", \"drives\": ", drives, "}\n");
}

bool owner_is_gone(const std::string& record) {
  const std::string pid = field(record, "pid"), ticks = field(record, "start_ticks");
  if (pid.empty() || pid.find_first_not_of("0123456789") != std::string::npos || ticks.empty()) return false;
  if (const std::string boot = field(record, "boot_id"); !boot.empty()) {
    if (boot != boot_id() || field(record, "pid_namespace") != pid_namespace()) return false;
  } else if (const std::string host = field(record, "host"); host.empty() || host != host_name()) {
    return false;
  }
  if (start_ticks("self").empty()) return false;  // no /proc to read
  return start_ticks(pid) != ticks;
}

bool locks_are_proof(int fd) {
  struct statfs info{};
  if (::fstatfs(fd, &info) != 0) return false;
  constexpr std::array<unsigned, 17> kOwn{
      0xEF53,      // ext2, ext3, ext4
      0x58465342,  // xfs
      0x9123683E,  // btrfs
      0xCA451A4E,  // bcachefs
      0x2FC12FC1,  // zfs
      0xF2F52010,  // f2fs
      0x01021994,  // tmpfs
      0x858458F6,  // ramfs
      0x794C7630,  // overlayfs
      0x3153464A,  // jfs
      0x52654973,  // reiserfs
      0x3434,      // nilfs2
      0x4D44,      // vfat
      0x2011BAB0,  // exfat
      0x7366746E,  // ntfs3
      0x5346544E,  // ntfs
      0x482B,      // hfs+
  };
  return std::find(kOwn.begin(), kOwn.end(), static_cast<unsigned>(info.f_type)) != kOwn.end();
}

}  // namespace zcomm::mem
