// Faults that the kernel itself makes, without an engine that pretends: writes cut short by a limit, files cut off
// underneath with and without checksums, copies into full places and out of damaged ones. On both engines.
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>

#include "faulty_engine.hpp"
#include "zcomm/error.hpp"

namespace kernel_faults_test {

using namespace zcomm;
using namespace zcomm::test;
namespace fs = std::filesystem;

namespace {

constexpr std::size_t kNbytes = 500003;

SwapFile::Options options_of(const Rig& rig, bool checksum = true) {
  SwapFile::Options options;
  options.engine = rig.engine == "threads" ? SwapFile::Engine::threads : SwapFile::Engine::io_uring;
  options.direct = rig.direct;
  options.block_nbytes = 64 << 10;
  options.depth = 4;
  options.checksum = checksum;
  return options;
}

bool holds(SwapFile& file, const std::string& key, const Pattern& wanted) {
  Pattern in(wanted.nbytes(), 99);
  file.read(key, in.data(), in.nbytes()).wait();
  return in == wanted;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// In a child: the process's limit of file sizes falls into the middle of a key while the file is in use.
int under_a_falling_limit(const std::string& place, const Rig& rig, rlim_t limit) {
  const auto file = SwapFile::open(place, options_of(rig));
  Pattern first(kNbytes, 1), second(kNbytes, 2), third(kNbytes, 3);
  file->write("first", first.data(), kNbytes).wait();
  file->write("second", second.data(), kNbytes).wait();
  const rlimit low{limit, RLIM_INFINITY};
  if (::setrlimit(RLIMIT_FSIZE, &low) != 0) return 1;
  try {
    file->write("second", third.data(), kNbytes).wait();
    return 2;
  } catch (const SystemError& error) {
    if (error.code != EFBIG || error.path != file->stats().path) return 3;
    if (!contains(error.what(), "write of key 'second' at offset ")) return 4;
  }
  try {  // the key holds parts of the second and the third data: neither is returned
    holds(*file, "second", second);
    return 5;
  } catch (const DataCorrupt& error) {
    if (!contains(error.what(), "'second' holds no data")) return 6;
  }
  file->write("first", third.data(), kNbytes).wait();
  const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
  if (::setrlimit(RLIMIT_FSIZE, &none) != 0) return 7;
  file->write("second", second.data(), kNbytes).wait();
  return holds(*file, "first", third) && holds(*file, "second", second) ? 0 : 8;
}

}  // namespace

TEST(SwapKernelFaults, a_file_size_limit_that_falls_while_in_use) {
  on_each_rig([](const Rig& rig) {
    const TempDirectory temp;
    // Within a block: the kernel writes the part below the limit, and reports it; then it refuses. At a block's end: at
    // once.
    for (const rlim_t limit : {rlim_t{503808 + 65536 + 8192}, rlim_t{503808 + 65536}}) {
      const int status = in_child([&] { return under_a_falling_limit(temp.path(), rig, limit); });
      if (status != 0) std::cerr << rig.engine << ", direct " << rig.direct << ", limit " << limit << "\n";
      EXPECT_EQ(status, 0);
    }
    EXPECT_TRUE(temp.names().empty());
  });
}

TEST(SwapKernelFaults, a_lost_write_is_found) {
  on_each_rig([](const Rig& rig) {  // the drive reports success and keeps the old data, once valid
    std::atomic<bool> losing{false};
    const Setup setup(rig, [&losing](FaultyEngine& engine) {
      engine.on_request = [&losing](mem::IoRequest& request) {
        if (losing && request.write && request.offset == 131072) request.offset = 1 << 20;
      };
    });
    setup.file->reserve("beyond", 2 << 20);
    Pattern old(kNbytes, 1), fresh(kNbytes, 2), in(kNbytes, 3);
    setup.file->release("beyond");
    setup.file->write("k", old.data(), kNbytes).wait();
    losing = true;
    setup.file->write("k", fresh.data(), kNbytes).wait();
    EXPECT_THROW_WITH(setup.file->read("k", in.data(), kNbytes).wait(), DataCorrupt, "'k' at offset 131072");
    losing = false;
    setup.file->write("k", fresh.data(), kNbytes).wait();
    EXPECT_TRUE(holds(*setup.file, "k", fresh));
  });
}

TEST(SwapKernelFaults, a_truncated_file_is_found_without_checksums_too) {
  on_each_rig([](const Rig& rig) {
    for (const std::size_t left : {std::size_t{0}, std::size_t{131072}, std::size_t{150000}}) {
      const TempDirectory temp;
      const auto file = SwapFile::open(temp.path(), options_of(rig, false));
      Pattern data(kNbytes, 1), in(kNbytes, 2);
      file->write("k", data.data(), kNbytes).wait();
      fs::resize_file(data_of(*file), left);
      EXPECT_THROW_WITH(file->read("k", in.data(), kNbytes).wait(), DataCorrupt, "read of key 'k' at offset ");
      file->write("k", data.data(), kNbytes).wait();
      EXPECT_TRUE(holds(*file, "k", data));
    }
  });
}

TEST(SwapKernelFaults, a_copy_of_a_file_cut_off_or_into_a_full_or_missing_place) {
  on_each_rig([](const Rig& rig) {
    const TempDirectory temp;
    const std::string full = temp.path() + "/full", drive = temp.path() + "/drive";
    const auto file = SwapFile::open(drive, options_of(rig));
    Pattern data(kNbytes, 1);
    file->write("k", data.data(), kNbytes).wait();
    const auto copy = [&](const std::string& to, int code, const std::string& part) {
      try {
        file->copy_to({to});
        EXPECT_TRUE(!"an error was expected");
      } catch (const SystemError& error) {
        EXPECT_EQ(error.code, code);
        EXPECT_TRUE(contains(error.what(), part));
      }
      EXPECT_FALSE(fs::exists(to));
    };
    copy(temp.path() + "/missing/copy", ENOENT, "/missing/copy");
    fs::create_directory(full);
    if (::mount("tmpfs", full.c_str(), "tmpfs", 0, "size=256k") == 0) {
      copy(full + "/copy", ENOSPC, full + "/copy");
      ::umount(full.c_str());
    }
    EXPECT_TRUE(holds(*file, "k", data));  // a copy that fails is none of the file's business
    const auto path = file->stats().path;
    fs::remove_all(drive);  // underneath
    copy(path + "/../" + SwapFile::kCopyName, ENOENT, SwapFile::kCopyName);
    EXPECT_EQ(file->copy_to({temp.path() + "/elsewhere"}).keys.size(), 1u);
    EXPECT_TRUE(holds(*file, "k", data));
  });
  on_each_rig([](const Rig& rig) {
    const TempDirectory temp;
    const auto file = SwapFile::open(temp.path() + "/drive", options_of(rig));
    Pattern data(kNbytes, 1);
    file->write("k", data.data(), kNbytes).wait();
    fs::resize_file(data_of(*file), 150000);
    EXPECT_THROW_WITH(file->copy_to({temp.path() + "/copy"}), DataCorrupt, file->stats().path);
    EXPECT_FALSE(fs::exists(temp.path() + "/copy"));
  });
}

TEST(SwapKernelFaults, a_run_killed_while_it_writes_is_removed_by_the_next) {
  on_each_rig([](const Rig& rig) {
    const TempDirectory temp;
    const auto stripes = {temp.path() + "/a", temp.path() + "/b"};
    const int status = in_child([&] {
      const auto file = SwapFile::open(stripes, options_of(rig));
      Pattern data(kNbytes, 1);
      for (int i = 0; i < 40; ++i) file->write("k" + std::to_string(i % 4), data.data(), kNbytes);
      ::kill(::getpid(), SIGKILL);
      return 1;
    });
    EXPECT_EQ(status, 128 + SIGKILL);
    for (const std::string& each : stripes) EXPECT_FALSE(fs::is_empty(each));
    const auto file = SwapFile::open(stripes, options_of(rig));
    Pattern data(kNbytes, 2);
    file->write("k1", data.data(), kNbytes).wait();
    EXPECT_TRUE(holds(*file, "k1", data));
    for (const std::string& each : stripes)
      EXPECT_EQ(std::distance(fs::directory_iterator(each), fs::directory_iterator()), 1);
    file->close();
    for (const std::string& each : stripes) EXPECT_TRUE(fs::is_empty(each));
  });
}

}  // namespace kernel_faults_test
