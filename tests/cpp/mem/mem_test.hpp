// Shared by the tests of this layer: a private directory, patterns.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "child.hpp"
#include "test.hpp"
#include "zcomm/swap_file.hpp"

namespace zcomm::test {

/// Removed with its contents. In ZCOMM_TEST_DIR or else the current directory, usually a file system with O_DIRECT.
class TempDirectory {
 public:
  TempDirectory() {
    const char* base = std::getenv("ZCOMM_TEST_DIR");
    std::string name = std::string(base != nullptr ? base : ".") + "/zcomm-test-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& each : std::filesystem::directory_iterator(path_)) found.push_back(each.path().filename());
    return found;
  }

 private:
  std::string path_;
};

/// An open file of this process that was opened as `path` and has no name any more; "" if there is none.
inline std::string nameless(const std::string& path) {
  const std::string wanted = std::filesystem::absolute(path).lexically_normal().string() + " (deleted)";
  for (const auto& each : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(each.path(), gone) == wanted) return each.path();
  }
  return {};
}

/// The data file of a drive, under a name that opens it.
inline std::string data_of(const SwapFile& file, std::size_t drive = 0) { return nameless(file.stats().paths[drive]); }

/// Bytes that differ by seed and position; `shift` moves the start off any alignment.
class Pattern {
 public:
  explicit Pattern(std::size_t nbytes, std::uint64_t seed = 0, std::size_t shift = 0)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(4096, (nbytes + shift + 4096) / 4096 * 4096)), &std::free),
        shift_(shift),
        nbytes_(nbytes) {
    fill(seed);
  }
  void fill(std::uint64_t seed) {
    std::uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
    for (std::size_t i = 0; i < nbytes_; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      data()[i] = static_cast<std::byte>(state >> 56);
    }
  }
  std::byte* data() { return memory_.get() + shift_; }
  std::size_t nbytes() const { return nbytes_; }
  bool operator==(const Pattern& other) const {
    return nbytes_ == other.nbytes_ &&
           std::equal(memory_.get() + shift_, memory_.get() + shift_ + nbytes_, other.memory_.get() + other.shift_);
  }

 private:
  std::unique_ptr<std::byte, decltype(&std::free)> memory_;
  std::size_t shift_, nbytes_;
};

/// The configurations every behaviour is tested on.
inline std::vector<SwapFile::Options> all_options() {
  std::vector<SwapFile::Options> all;
  for (const auto engine : {SwapFile::Engine::io_uring, SwapFile::Engine::threads}) {
    for (const bool direct : {true, false}) {
      SwapFile::Options options;
      options.engine = engine;
      options.direct = direct;
      options.block_nbytes = 256 << 10;
      options.depth = 5;
      all.push_back(options);
    }
  }
  return all;
}

}  // namespace zcomm::test
