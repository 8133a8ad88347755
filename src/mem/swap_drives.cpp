#include "mem/swap_drives.hpp"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/error.hpp"

namespace zcomm::mem {

SwapDrives::SwapDrives(const std::vector<std::string>& parents, bool direct) {
  if (parents.empty()) throw InvalidArgument("SwapFile: the list of directories is empty");
  directories_.reserve(parents.size());
  for (std::size_t drive = 0; drive < parents.size(); ++drive) {
    const std::string& parent = parents[drive];
    directories_.push_back(SwapDirectory::create(parent, drive, parents.size()));
    for (std::size_t other = 0; other < drive; ++other) {
      std::error_code unknown;
      if (std::filesystem::equivalent(parents[other], parent, unknown))
        throw InvalidArgument(text("SwapFile: directories ", other, " and ", drive, " are the same, '", parent, "'"));
    }
    const SwapDirectory& own = directories_.back();
    files_.push_back(std::make_unique<DataFile>(own.fd(), kDataName, own.path() + "/" + kDataName, direct));
  }
}

bool SwapDrives::direct() const {
  return std::all_of(files_.begin(), files_.end(), [](const auto& file) { return file->direct(); });
}

std::size_t SwapDrives::alignment() const {
  std::size_t most = 1;
  for (const auto& file : files_) most = std::max(most, file->alignment());
  return most;
}

std::size_t SwapDrives::memory_alignment() const {
  std::size_t most = 1;
  for (const auto& file : files_) most = std::max(most, file->memory_alignment());
  return most;
}

std::uint64_t SwapDrives::nbytes() const {
  std::uint64_t sum = 0;
  for (const auto& file : files_) sum += file->nbytes();
  return sum;
}

std::vector<std::string> SwapDrives::paths() const {
  std::vector<std::string> paths;
  for (const auto& file : files_) paths.push_back(file->path());
  return paths;
}

void SwapDrives::remove() noexcept {
  for (auto& file : files_) file->close();  // first: network file systems keep an open file in its directory
  for (SwapDirectory& each : directories_) each.remove();
}

void SwapDrives::disown() noexcept {
  for (SwapDirectory& each : directories_) each.disown();
  for (auto& file : files_) [[maybe_unused]]
    auto* left = file.release();  // its descriptors end with the process
}

}  // namespace zcomm::mem
