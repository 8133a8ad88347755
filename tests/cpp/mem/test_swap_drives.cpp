// A swap file over several drives: the location of tiles, one directory each, and a failure on one of them.
#include <signal.h>
#include <sys/mount.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <map>

#include "faulty_engine.hpp"
#include "mem/stripes.hpp"
#include "zcomm/error.hpp"

namespace drives_test {

using namespace zcomm;
using namespace zcomm::test;
namespace fs = std::filesystem;

namespace {

constexpr std::size_t kNbytes = 500003;  // eight tiles of 64 KiB, the last one short

bool round_trips(SwapFile& file, const std::string& key, std::uint64_t seed = 1) {
  Pattern out(kNbytes, seed), in(kNbytes, seed + 1, 5);
  file.write(key, out.data(), kNbytes).wait();
  file.read(key, in.data(), kNbytes).wait();
  return in == out;
}

std::vector<std::string> three(const TempDirectory& temp) {
  return {temp.path() + "/a", temp.path() + "/b", temp.path() + "/c"};
}

std::string content(const fs::path& path) {
  std::ifstream file(path);
  return std::string((std::istreambuf_iterator<char>(file)), {});
}

void fill_one_of_three(const std::string& engine) {
  const TempDirectory temp;
  const auto directories = three(temp);
  fs::create_directory(directories[1]);
  if (::mount("tmpfs", directories[1].c_str(), "tmpfs", 0, "size=2m") != 0) {
    std::cout << "     no right to mount: skipped\n";
    return;
  }
  {
    SwapFile::Options options;
    options.engine = engine == "threads" ? SwapFile::Engine::threads : SwapFile::Engine::io_uring;
    options.block_nbytes = 64 << 10;
    const auto file = SwapFile::open(directories, options);
    EXPECT_FALSE(file->stats().direct);  // one of three lacks it: noted, and the others keep it
    const auto notes = file->stats().notes;
    EXPECT_TRUE(std::any_of(notes.begin(), notes.end(), [&](const std::string& note) {
      return note.find("O_DIRECT is not there for '" + directories[1]) != std::string::npos;
    }));
    EXPECT_TRUE(round_trips(*file, "first"));
    const auto reserved = file->stats().reserved_nbytes;
    const std::string full = file->stats().paths[1];
    try {
      file->reserve("big", 12 << 20);
      EXPECT_TRUE(!"ENOSPC was expected");
    } catch (const SystemError& error) {
      EXPECT_EQ(error.code, ENOSPC);
      EXPECT_EQ(error.path, full);
    }
    EXPECT_EQ(file->stats().reserved_nbytes, reserved);
    EXPECT_TRUE(round_trips(*file, "second"));
  }
  EXPECT_TRUE(fs::is_empty(directories[1]));
  ::umount(directories[1].c_str());
}

}  // namespace

TEST(Stripes, tiles_go_round_and_share_no_byte) {
  constexpr std::size_t kTile = 16384;
  for (const std::size_t drives : {1, 2, 3, 5}) {
    mem::Stripes stripes(drives, kTile);
    std::map<std::pair<std::size_t, std::uint64_t>, int> owner;  // page -> key
    std::vector<mem::KeyExtents> taken;
    const std::size_t sizes[] = {0, 1, 4096, 16384, 16385, 100000, 5, 49152, 65536, 200001};
    std::size_t next = 0;
    for (int key = 0; key < 10; ++key) {
      const std::size_t nbytes = sizes[key];
      const mem::KeyExtents extents = stripes.take(nbytes);
      EXPECT_EQ(extents.first, next);
      next = (next + (nbytes + kTile - 1) / kTile) % drives;
      for (std::size_t begin = 0; begin < nbytes; begin += 4096) {
        const mem::Location at = mem::Stripes::locate(extents, begin, kTile);
        EXPECT_EQ(at.drive, (extents.first + begin / kTile) % drives);
        EXPECT_EQ(at.offset % 4096, 0u);
        EXPECT_LE(at.offset + 4096, stripes.end(at.drive));
        EXPECT_TRUE(owner.emplace(std::pair{at.drive, at.offset / 4096}, key).second);
      }
      taken.push_back(extents);
    }
    EXPECT_EQ(stripes.used_nbytes(), owner.size() * 4096);
    for (int key = 0; key < 10; ++key) stripes.give_back(taken[static_cast<std::size_t>(key)], sizes[key]);
    EXPECT_EQ(stripes.used_nbytes(), 0u);
    for (std::size_t drive = 0; drive < drives; ++drive) EXPECT_EQ(stripes.end(drive), 0u);
  }
}

TEST(SwapDrives, data_on_all_of_them_and_nothing_left) {
  on_each_rig([](const Rig& rig) {
    const Setup setup(rig, {[](FaultyEngine&) {}}, 3);
    for (std::uint64_t seed = 0; seed < 4; ++seed)
      EXPECT_TRUE(round_trips(*setup.file, "k" + std::to_string(seed), seed));
    const auto stats = setup.file->stats();
    EXPECT_EQ(stats.paths.size(), 3u);
    EXPECT_EQ(stats.path, stats.paths[0]);
    std::uint64_t sum = 0;
    for (std::size_t drive = 0; drive < 3; ++drive) {
      const fs::path data = stats.paths[drive], own = data.parent_path();
      EXPECT_TRUE(own.parent_path() == setup.directories[drive]);
      const std::string owner = content(own / "lock");
      EXPECT_TRUE(owner.find("\"drive\": " + std::to_string(drive) + ", \"drives\": 3}") != std::string::npos);
      const std::uint64_t nbytes = fs::file_size(data_of(*setup.file, drive));
      EXPECT_GE(nbytes, 4 * kNbytes / 3 - 65536);
      sum += nbytes;
    }
    EXPECT_EQ(sum, stats.file_nbytes);
    EXPECT_EQ(stats.written_nbytes, 4 * kNbytes);
    setup.file->close();
    for (const std::string& each : setup.directories) EXPECT_TRUE(fs::is_empty(each));
  });
}

TEST(SwapDrives, keys_of_one_block_spread_too) {
  for (const std::string& engine : engine_names()) {
    std::map<int, int> writes;  // descriptor -> requests
    const Setup setup(
        {engine, true},
        [&writes](FaultyEngine& each) {
          each.on_request = [&writes](mem::IoRequest& request) { ++writes[request.fd]; };
        },
        3);
    Pattern data(65536, 1);
    std::vector<Work> works;
    for (int i = 0; i < 30; ++i)
      works.push_back(setup.file->write("k" + std::to_string(i), data.data(), data.nbytes()));
    setup.file->wait();
    setup.file->close();
    EXPECT_EQ(writes.size(), 3u);
    for (const auto& [fd, count] : writes) EXPECT_EQ(count, 10);
  }
}

TEST(SwapDrives, preallocated_reserved_and_reused) {
  const TempDirectory temp;
  SwapFile::Options options;
  options.block_nbytes = 64 << 10;
  options.nbytes = 3 << 20;
  const auto file = SwapFile::open(three(temp), options);
  const auto before = file->stats();
  for (std::size_t drive = 0; drive < before.paths.size(); ++drive)
    EXPECT_EQ(fs::file_size(data_of(*file, drive)), (1u << 20) + (64u << 10));
  for (int round = 0; round < 50; ++round) {  // freed space is used again
    file->reserve("a", 1 << 20);
    file->reserve("b", 700001);
    file->release("a");
    file->reserve("b", 1000003);
    file->release("b");
  }
  EXPECT_EQ(file->stats().file_nbytes, before.file_nbytes);
  EXPECT_EQ(file->stats().reserved_nbytes, 0u);
}

TEST(SwapDrives, an_error_on_one_names_it_and_spares_the_rest) {
  on_each_rig([](const Rig& rig) {
    std::atomic<int> broken_fd{-1};
    std::atomic<bool> watching{true};
    std::vector<int> fds;
    const Setup setup(
        rig,
        [&](FaultyEngine& engine) {
          engine.on_request = [&](mem::IoRequest& request) {
            if (watching && std::find(fds.begin(), fds.end(), request.fd) == fds.end()) fds.push_back(request.fd);
          };
          engine.on_result = [&](const mem::IoRequest& request, std::int64_t& result) {
            if (request.fd == broken_fd) result = request.write ? -ENOSPC : -EIO;
          };
        },
        3);
    EXPECT_TRUE(round_trips(*setup.file, "first"));
    watching = false;
    EXPECT_EQ(fds.size(), 3u);
    const auto paths = setup.file->stats().paths;
    Pattern data(kNbytes, 1), small(100, 2);
    for (std::size_t drive = 0; drive < 3; ++drive) {
      broken_fd = fds[drive];  // the first key began on drive 0: its tiles met the descriptors in order
      try {
        setup.file->write("second", data.data(), kNbytes).wait();
        EXPECT_TRUE(!"an error was expected");
      } catch (const SystemError& error) {
        EXPECT_EQ(error.code, ENOSPC);
        EXPECT_EQ(error.path, paths[drive]);
        EXPECT_TRUE(std::string(error.what()).find(paths[drive]) != std::string::npos);
      }
      try {
        setup.file->read("first", data.data(), kNbytes).wait();
        EXPECT_TRUE(!"an error was expected");
      } catch (const SystemError& error) {
        EXPECT_EQ(error.code, EIO);
        EXPECT_EQ(error.path, paths[drive]);
      }
      int good = 0;  // keys of one block on the other drives do not notice
      for (int i = 0; i < 3; ++i) {
        const std::string key = std::to_string(drive) + "/" + std::to_string(i);
        try {
          setup.file->write(key, small.data(), small.nbytes()).wait();
          ++good;
        } catch (const SystemError& error) {
          EXPECT_EQ(error.path, paths[drive]);
        }
      }
      EXPECT_EQ(good, 2);
      broken_fd = -1;
      EXPECT_TRUE(round_trips(*setup.file, "second", drive));
    }
  });
}

TEST(SwapDrives, damage_on_one_names_it) {
  on_each_rig([](const Rig& rig) {
    const Setup setup(rig, {[](FaultyEngine&) {}}, 3);
    Pattern data(kNbytes, 1);
    setup.file->write("k", data.data(), kNbytes).wait();
    const auto paths = setup.file->stats().paths;
    fs::resize_file(data_of(*setup.file, 2), 65536);  // keeps tile 2, loses tile 5
    try {
      setup.file->read("k", data.data(), kNbytes).wait();
      EXPECT_TRUE(!"damage was expected");
    } catch (const DataCorrupt& error) {
      EXPECT_EQ(error.path, paths[2]);
      EXPECT_TRUE(std::string(error.what()).find("'k' at offset 65536 of " + paths[2]) != std::string::npos);
    }
    EXPECT_TRUE(round_trips(*setup.file, "k"));
    fs::remove_all(setup.directories[1]);
    EXPECT_TRUE(round_trips(*setup.file, "other"));
    setup.file->close();
    EXPECT_TRUE(fs::is_empty(setup.directories[0]) && fs::is_empty(setup.directories[2]));
  });
}

TEST(SwapDrives, what_fails_while_opening_leaves_nothing) {
  const TempDirectory temp;
  const auto directories = three(temp);
  std::ofstream(directories[2]) << "a file";
  EXPECT_THROW_WITH(SwapFile::open(directories, {}), SystemError, directories[2]);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(fs::is_empty(directories[static_cast<std::size_t>(i)]));
  EXPECT_THROW_WITH(SwapFile::open({directories[0], directories[1], directories[0] + "/."}, {}), InvalidArgument,
                    "directories 0 and 2 are the same");
  EXPECT_THROW_WITH(SwapFile::open(std::vector<std::string>{}, {}), InvalidArgument, "empty");
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(fs::is_empty(directories[static_cast<std::size_t>(i)]));
}

TEST(SwapDrives, one_full_drive_is_enospc_with_its_path) {
  for (const std::string& engine : engine_names()) fill_one_of_three(engine);
}

TEST(SwapDrives, a_killed_run_is_removed_on_each) {
  const TempDirectory temp;
  const auto directories = three(temp);
  const int status = in_child([&] {
    const auto file = SwapFile::open(directories, {});
    if (!round_trips(*file, "k")) return 1;
    ::kill(::getpid(), SIGKILL);
    return 2;
  });
  EXPECT_EQ(status, 128 + SIGKILL);
  for (const std::string& each : directories) EXPECT_FALSE(fs::is_empty(each));
  SwapFile::open(directories, {})->close();
  for (const std::string& each : directories) EXPECT_TRUE(fs::is_empty(each));
}

}  // namespace drives_test
