// Copies of the data files: every copy method gives the same bytes; a failed copy leaves no file.
#include <fcntl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/unique_fd.hpp"
#include "faulty_engine.hpp"
#include "forbid.hpp"
#include "mem/io/crc32c.hpp"
#include "mem/io/file_copy.hpp"
#include "mem/stripes.hpp"
#include "zcomm/error.hpp"

namespace snapshot_test {

using namespace zcomm;
using namespace zcomm::test;
namespace fs = std::filesystem;

namespace {

constexpr std::size_t kNbytes = 3 << 20;
constexpr auto kMethods = {mem::CopyMethod::reflink, mem::CopyMethod::copy_file_range, mem::CopyMethod::read_write};

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string((std::istreambuf_iterator<char>(file)), {});
}

UniqueFd make_source(const std::string& path, Pattern& data) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  EXPECT_EQ(::pwrite(fd.get(), data.data(), data.nbytes(), 0), static_cast<ssize_t>(data.nbytes()));
  return fd;
}

}  // namespace

TEST(FileCopy, ranges_at_their_places_by_every_method) {
  const TempDirectory temp;
  Pattern data(kNbytes, 1);
  const UniqueFd source = make_source(temp.path() + "/source", data);
  const std::vector<mem::Range> ranges{{4096, 8192}, {1 << 20, 1 << 20}, {kNbytes - 4096, 4096}};
  for (const auto best : kMethods) {
    const std::string path = temp.path() + "/" + mem::name_of(best);
    const auto used = mem::copy_file({source.get(), "source"}, path, ranges, kNbytes, true, best);
    EXPECT_GE(static_cast<int>(used), static_cast<int>(best));
    const std::string copy = content(path);
    EXPECT_EQ(copy.size(), kNbytes);
    for (const mem::Range& range : ranges)
      EXPECT_EQ(std::memcmp(copy.data() + range.offset, data.data() + range.offset, range.nbytes), 0);
    EXPECT_THROW_WITH(mem::copy_file({source.get(), "source"}, path, ranges, kNbytes, true, best), SystemError,
                      "create");
    EXPECT_TRUE(content(path) == copy);  // the existing file is not touched
  }
}

TEST(FileCopy, a_source_that_ends_early_leaves_no_file) {
  const TempDirectory temp;
  Pattern data(kNbytes, 1);
  const UniqueFd source = make_source(temp.path() + "/source", data);
  EXPECT_EQ(::ftruncate(source.get(), 100000), 0);
  for (const auto best : {mem::CopyMethod::copy_file_range, mem::CopyMethod::read_write}) {
    EXPECT_THROW_WITH(
        mem::copy_file({source.get(), "the source"}, temp.path() + "/copy", {{0, kNbytes}}, kNbytes, true, best),
        DataCorrupt, "offset 100000 of the source");
    EXPECT_FALSE(fs::exists(temp.path() + "/copy"));
  }
}

TEST(FileCopy, a_full_disk_leaves_no_file) {
  const TempDirectory temp;
  Pattern data(kNbytes, 1);
  const UniqueFd source = make_source(temp.path() + "/source", data);
  const std::string full = temp.path() + "/full";
  fs::create_directory(full);
  if (::mount("none", full.c_str(), "tmpfs", 0, "size=1m") != 0) return;  // not root
  for (const auto best : kMethods) {
    try {
      mem::copy_file({source.get(), "source"}, full + "/copy", {{0, kNbytes}}, kNbytes, true, best);
      EXPECT_TRUE(!"an error was expected");
    } catch (const SystemError& error) {
      EXPECT_EQ(error.code, ENOSPC);
      EXPECT_EQ(error.path, full + "/copy");
    }
    EXPECT_TRUE(fs::is_empty(full));
  }
  ::umount(full.c_str());
}

TEST(FileCopy, writes_that_do_nothing_end_in_an_error) {
  const TempDirectory temp;
  const int status = in_child([&] {
    Pattern data(kNbytes, 1);
    const UniqueFd source = make_source(temp.path() + "/source", data);
    if (!forbid(__NR_pwrite64, 0)) return kSkipped;
    try {
      mem::copy_file({source.get(), "source"}, temp.path() + "/copy", {{0, kNbytes}}, kNbytes, true,
                     mem::CopyMethod::read_write);
      return 1;
    } catch (const SystemError& error) {
      return error.code == EIO && error.path == temp.path() + "/copy" ? 0 : 2;
    }
  });
  if (status != kSkipped) EXPECT_EQ(status, 0);
  EXPECT_FALSE(fs::exists(temp.path() + "/copy"));
}

TEST(SwapSnapshot, holds_the_keys_their_places_and_their_checksums) {
  on_each_rig([](const Rig& rig) {
    for (const std::size_t drives : {1, 3}) {
      const Setup setup(rig, {[](FaultyEngine&) {}}, drives);
      Pattern a(500003, 1), b(4096, 2);
      setup.file->write("b", b.data(), b.nbytes());
      setup.file->reserve("reserved", 100);
      setup.file->write("a", a.data(), a.nbytes());  // not waited for: copy_to() does
      std::vector<std::string> files;
      for (std::size_t i = 0; i < drives; ++i) files.push_back(setup.temp.path() + "/copy" + std::to_string(i));
      const auto image = setup.file->copy_to(files);
      EXPECT_EQ(image.keys.size(), 2u);
      EXPECT_EQ(image.keys[0].key, "a");
      EXPECT_EQ(image.keys[1].nbytes, 4096u);
      EXPECT_EQ(image.keys[1].checksums[0], mem::crc32c(b.data(), 4096));
      std::vector<std::string> copies;
      for (const std::string& file : files) copies.push_back(content(file));
      const auto& key = image.keys[0];
      for (std::size_t at = 0; at < a.nbytes(); at += 4096) {
        const auto place = mem::Stripes::locate({key.first, key.offsets}, at, image.tile_nbytes);
        const std::size_t count = std::min<std::size_t>(4096, a.nbytes() - at);
        EXPECT_EQ(std::memcmp(copies[place.drive].data() + place.offset, a.data() + at, count), 0);
      }
      EXPECT_THROW_WITH(setup.file->copy_to({}), InvalidArgument, "0 files");
      Pattern in(500003, 3);
      setup.file->read("a", in.data(), in.nbytes()).wait();  // and remains usable
      EXPECT_TRUE(in == a);
    }
  });
}

TEST(SwapSnapshot, failed_writes_and_full_drives_leave_nothing) {
  on_each_rig([](const Rig& rig) {
    std::atomic<bool> broken{false};
    const Setup setup(
        rig,
        [&broken](FaultyEngine& engine) {
          engine.on_result = [&broken](const mem::IoRequest& request, std::int64_t& result) {
            if (request.write && broken) result = -EIO;
          };
        },
        2);
    Pattern data(300000, 1);
    setup.file->write("a", data.data(), data.nbytes()).wait();
    const std::vector<std::string> files{setup.temp.path() + "/copy0", setup.temp.path() + "/copy1"};
    broken = true;
    Work failing = setup.file->write("a", data.data(), data.nbytes());
    EXPECT_THROW_WITH(setup.file->copy_to(files), SystemError, "write of key 'a'");  // as wait() does
    EXPECT_THROW_WITH(setup.file->copy_to(files), DataCorrupt, "'a' holds no data");
    broken = false;
    setup.file->write("a", data.data(), data.nbytes()).wait();
    std::ofstream(files[1]) << "in the way";
    EXPECT_THROW_WITH(setup.file->copy_to(files), SystemError, "copy1");
    EXPECT_FALSE(fs::exists(files[0]));
    EXPECT_EQ(content(files[1]), "in the way");
  });
}

TEST(SwapSnapshot, a_copy_beside_has_no_name_and_ends_with_its_descriptors) {
  on_each_rig([](const Rig& rig) {
    const Setup setup(rig, {[](FaultyEngine&) {}}, 2);
    Pattern old(200000, 1), fresh(200000, 2), back(200000, 3);
    setup.file->write("a", old.data(), old.nbytes());  // not waited for
    std::vector<int> files;
    const auto image = setup.file->copy_beside(files);
    setup.file->write("a", fresh.data(), fresh.nbytes()).wait();
    EXPECT_EQ(files.size(), 2u);
    const auto paths = setup.file->stats().paths;
    for (std::size_t drive = 0; drive < 2; ++drive) {
      const fs::path own = fs::path(paths[drive]).parent_path();
      EXPECT_EQ(std::distance(fs::directory_iterator(own), fs::directory_iterator()), 1);  // the lock
      EXPECT_EQ(fs::file_size("/proc/self/fd/" + std::to_string(files[drive])), image.file_nbytes[drive]);
    }
    const SwapFile::ImageKey& key = image.keys.at(0);
    for (std::size_t begin = 0, tile = 0; begin < key.nbytes; begin += image.tile_nbytes, ++tile) {
      const std::size_t drive = (key.first + tile) % 2, nbytes = std::min(image.tile_nbytes, key.nbytes - begin);
      const auto at = static_cast<off_t>(key.offsets[drive] + tile / 2 * image.tile_nbytes);
      EXPECT_EQ(::pread(files[drive], back.data() + begin, nbytes, at), static_cast<ssize_t>(nbytes));
    }
    EXPECT_TRUE(back == old);
    for (const int file : files) ::close(file);
    fs::remove_all(setup.directories[1]);
    files.clear();
    EXPECT_THROW_WITH(setup.file->copy_beside(files), SystemError, "cannot create");
    EXPECT_TRUE(files.empty());
  });
}

}  // namespace snapshot_test
