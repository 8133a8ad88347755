// Effects of the system on a swap file: damage on disk, directories removed, io_uring forbidden, locked memory used up,
// several runs in one directory. On both engines.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <thread>

#include "base/unique_fd.hpp"
#include "faulty_engine.hpp"
#include "forbid.hpp"
#include "mem/io/kernel_ring.hpp"
#include "zcomm/error.hpp"

namespace environment_test {

using namespace zcomm;
using namespace zcomm::test;
namespace fs = std::filesystem;

namespace {

constexpr std::size_t kNbytes = 300003;

SwapFile::Options options_of(const Rig& rig) {
  SwapFile::Options options;
  options.engine = rig.engine == "threads" ? SwapFile::Engine::threads : SwapFile::Engine::io_uring;
  options.direct = rig.direct;
  options.block_nbytes = 64 << 10;
  options.depth = 4;
  return options;
}

bool round_trips(SwapFile& file, const std::string& key = "k") {
  Pattern out(kNbytes, 7), in(kNbytes, 8);
  file.write(key, out.data(), kNbytes).wait();
  file.read(key, in.data(), kNbytes).wait();
  return in == out;
}

/// Changes one byte on disk, which the next direct read returns.
void flip(const std::string& path, off_t offset) {
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  unsigned char byte = 0;
  EXPECT_EQ(::pread(fd.get(), &byte, 1, offset), 1);
  byte ^= 1;
  EXPECT_EQ(::pwrite(fd.get(), &byte, 1, offset), 1);
  EXPECT_EQ(::fsync(fd.get()), 0);
}

void expect_damage(Work work, const std::string& path, const std::string& where, const std::string& what) {
  try {
    work.wait();
    EXPECT_TRUE(!"damage was expected");
  } catch (const DataCorrupt& error) {
    EXPECT_EQ(error.code, EIO);
    EXPECT_EQ(error.path, path);
    for (const std::string& part : {where, path, what})
      if (std::string(error.what()).find(part) == std::string::npos)
        test::fail(__FILE__, __LINE__, "no '" + part + "' in " + error.what());
  }
}

/// In a child in which `number` fails with `code`: threads serve, and `reason` is given; a request for io_uring is
/// refused.
int without_io_uring(const std::string& place, long number, int code, const std::string& reason) {
  if (!forbid(number, code)) return kSkipped;
  const auto file = SwapFile::open(place, {});
  const auto stats = file->stats();
  if (stats.engine != "threads") return 1;
  if (stats.notes.empty() || stats.notes[0].find("no io_uring") == std::string::npos) return 2;
  if (!round_trips(*file)) return 4;
  try {
    ::setenv("ZCOMM_IO", "io_uring", 1);
    SwapFile::open(place, {});
    return 7;
  } catch (const Unsupported&) {
    ::unsetenv("ZCOMM_IO");
  }
  try {
    SwapFile::Options options;
    options.engine = SwapFile::Engine::io_uring;
    SwapFile::open(place, options);
    return 5;
  } catch (const Unsupported& error) {
    if (stats.notes[0].find(reason) == std::string::npos) return 3;
    return std::string(error.what()).find(reason) == std::string::npos ? 6 : 0;
  }
}

}  // namespace

TEST(SwapEnvironment, a_flipped_byte_on_disk_is_named) {
  on_each_rig([](const Rig& rig) {
    const TempDirectory temp;
    const auto file = SwapFile::open(temp.path(), options_of(rig));
    Pattern data(kNbytes, 5), back(kNbytes, 6);
    file->write("first", data.data(), kNbytes).wait();
    file->write("layer.3", data.data(), kNbytes).wait();
    const std::string path = file->stats().path;
    // The second key's extent begins at 303104; with direct I/O its tail is a block of its own.
    for (const auto& [offset, block] : {std::pair{303104 + 70000, 303104 + 65536}, {303104, 303104}}) {
      flip(data_of(*file), offset);
      expect_damage(file->read("layer.3", back.data(), kNbytes), path, "'layer.3' at offset " + std::to_string(block),
                    "differ from the data written");
      flip(data_of(*file), offset);
      file->read("layer.3", back.data(), kNbytes).wait();
      EXPECT_TRUE(back == data);
    }
    flip(data_of(*file), 303104 + static_cast<off_t>(kNbytes) - 1);
    expect_damage(file->read("layer.3", back.data(), kNbytes), path, "'layer.3' at offset ",
                  "differ from the data written");
    file->read("first", back.data(), kNbytes).wait();
    EXPECT_TRUE(back == data);
    EXPECT_EQ(file->stats().error_count, 3u);
  });
}

TEST(SwapEnvironment, a_truncated_file_is_named_and_written_again) {
  on_each_rig([](const Rig& rig) {
    for (const std::size_t left : {std::size_t{0}, std::size_t{131072}, std::size_t{150000}, kNbytes - 1}) {
      const TempDirectory temp;
      const auto file = SwapFile::open(temp.path(), options_of(rig));
      Pattern data(kNbytes, 5), back(kNbytes, 6);
      file->write("layer.3", data.data(), kNbytes).wait();
      const std::string path = file->stats().path;
      fs::resize_file(data_of(*file), left);
      expect_damage(file->read("layer.3", back.data(), kNbytes), path, "'layer.3' at offset ", "");
      EXPECT_TRUE(round_trips(*file, "layer.3"));
    }
  });
}

TEST(SwapEnvironment, a_directory_removed_underneath_still_serves) {
  on_each_rig([](const Rig& rig) {
    const TempDirectory temp;
    const std::string parent = temp.path() + "/parent";
    const auto file = SwapFile::open(parent, options_of(rig));
    Pattern out(kNbytes, 1), in(kNbytes, 2);
    file->write("old", out.data(), kNbytes).wait();
    fs::remove_all(parent);
    file->read("old", in.data(), kNbytes).wait();
    EXPECT_TRUE(in == out);
    file->reserve("new", 80 << 20);
    EXPECT_TRUE(round_trips(*file, "other"));
    // A foreign directory of the same name is not touched.
    const fs::path own = fs::path(file->stats().path).parent_path();
    fs::create_directories(own);
    std::ofstream(own / "data") << "another's";
    file->close();
    EXPECT_TRUE(fs::exists(own / "data"));
    EXPECT_TRUE(round_trips(*SwapFile::open(parent, options_of(rig))));
  });
}

TEST(SwapEnvironment, io_uring_forbidden_is_a_fallback_that_is_said) {
  using namespace mem::ring_abi;
  const TempDirectory temp;
  std::string why;  // this machine's own reason comes first, if it has one
  mem::make_io_uring_engine(1, &why);
  // EPERM: a container's filter, and sysctl kernel.io_uring_disabled. ENOSYS: an old kernel, or a filter.
  // ENOMEM: the answer of io_uring_setup when RLIMIT_MEMLOCK is used up (before Linux 5.12).
  // 0: a filter that pretends.
  for (const long number : {kCallSetup, kCallEnter, kCallRegister}) {
    for (const int code : {EPERM, ENOSYS, ENOMEM, 0}) {
      if (code == 0 && number == kCallSetup) continue;  // that would be standard input
      std::string reason = code == 0 ? "does nothing" : std::strerror(code);
      if (number == kCallRegister) reason = "tell";
      if (!why.empty()) reason = "the kernel";
      const int status = in_child([&] { return without_io_uring(temp.path(), number, code, reason); });
      if (status == kSkipped) {
        std::cout << "     no seccomp filters here: skipped\n";
        return;
      }
      if (status != 0) std::cerr << "call " << number << " with errno " << code << "\n";
      EXPECT_EQ(status, 0);
    }
  }
  EXPECT_TRUE(temp.names().empty());
}

TEST(SwapEnvironment, io_uring_lost_on_the_way_ends_in_its_error) {
  const TempDirectory temp;
  const int status = in_child([&] {
    SwapFile::Options options;
    options.engine = SwapFile::Engine::automatic;
    const auto file = SwapFile::open(temp.path(), options);
    if (file->stats().engine != "io_uring") return kSkipped;
    if (!round_trips(*file)) return 1;
    if (!forbid(mem::ring_abi::kCallEnter, EPERM)) return kSkipped;  // a supervisor may install a filter late
    try {
      // The call that waits for work may have passed the filter already: the second operation cannot have.
      round_trips(*file);
      round_trips(*file);
      return 2;
    } catch (const SystemError& error) {
      if (error.code != EPERM || std::string(error.what()).find("io_uring") == std::string::npos) return 3;
    }
    try {
      round_trips(*file);
      return 4;
    } catch (const SystemError&) {
    }
    file->close();
    return 0;
  });
  if (status == kSkipped) {
    std::cout << "     no io_uring or no seccomp filters here: skipped\n";
    return;
  }
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(temp.names().empty());
}

TEST(SwapEnvironment, locked_memory_used_up) {
  on_each_rig([](const Rig& rig) {
    const TempDirectory temp;
    ::chmod(temp.path().c_str(), 0777);
    const int status = in_child([&] {
      const rlimit none{0, 0};
      ::setrlimit(RLIMIT_MEMLOCK, &none);
      if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0) return kSkipped;  // root's is not counted
      SwapFile::Options options = options_of(rig);
      options.engine = SwapFile::Engine::automatic;  // before Linux 5.12 io_uring is refused: threads serve
      if (rig.engine == "threads") options.engine = SwapFile::Engine::threads;
      const auto file = SwapFile::open(temp.path(), options);
      return round_trips(*file) ? 0 : 1;
    });
    if (status != kSkipped) EXPECT_EQ(status, 0);
    EXPECT_TRUE(temp.names().empty());
  });
}

TEST(SwapEnvironment, no_more_threads) {
  on_each_rig([](const Rig& rig) {
    const TempDirectory temp;
    for (const long number : {__NR_clone3, __NR_clone}) {
      const int status = in_child([&] {
        // glibc tries clone3, and clone if the kernel lacks it.
        if (!forbid(__NR_clone, EAGAIN) || !forbid(__NR_clone3, number == __NR_clone3 ? EAGAIN : ENOSYS))
          return kSkipped;
        try {
          SwapFile::open(temp.path(), options_of(rig));
          return 1;
        } catch (const SystemError& error) {
          return error.code == EAGAIN && std::string(error.what()).find("RLIMIT_NPROC") != std::string::npos ? 0 : 2;
        }
      });
      if (status != kSkipped) EXPECT_EQ(status, 0);
    }
    EXPECT_TRUE(temp.names().empty());
  });
}

TEST(SwapEnvironment, several_runs_in_one_directory) {
  on_each_rig([](const Rig& rig) {
    const TempDirectory temp;
    std::vector<pid_t> runs;
    for (int run = 0; run < 4; ++run) {
      const pid_t child = ::fork();
      if (child == 0) {
        int code = 99;
        try {
          code = 0;
          for (int i = 0; i < 6 && code == 0; ++i) {
            const auto file = SwapFile::open(temp.path(), options_of(rig));
            if (!round_trips(*file, "run " + std::to_string(run))) code = 1;
            if (run == 3 && i == 3) ::kill(::getpid(), SIGKILL);  // one of them dies in the middle
          }
        } catch (...) {
          code = 98;
        }
        ::_exit(code);
      }
      runs.push_back(child);
    }
    for (std::size_t run = 0; run < runs.size(); ++run) {
      int status = 0;
      ::waitpid(runs[run], &status, 0);
      if (run == 3) {
        EXPECT_TRUE(WIFSIGNALED(status));
      } else {
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
      }
    }
    SwapFile::open(temp.path(), options_of(rig))->close();
    EXPECT_TRUE(temp.names().empty());
  });
}

}  // namespace environment_test
