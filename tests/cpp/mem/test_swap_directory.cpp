// Which process may use, fill and remove files on disk: errors at open, full disks, directories of dead and of living
// processes.
#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <functional>
#include <iterator>

#include "faulty_engine.hpp"
#include "forbid.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::test;
namespace fs = std::filesystem;

namespace {

/// The errno of the SystemError that `body` throws, with its message in the second argument; 0: none.
int error_of(const std::function<void()>& body, std::string* what = nullptr) {
  try {
    body();
  } catch (const SystemError& error) {
    if (what != nullptr) *what = error.what();
    return error.path.empty() ? -1 : error.code;
  }
  return 0;
}

unsigned mode_of(const fs::path& path) {
  struct stat info{};
  ::lstat(path.c_str(), &info);
  return info.st_mode & 07777;
}

/// A child that opens a SwapFile in `parent`, reports it, and then waits to be killed.
pid_t start_owner(const std::string& parent, const SwapFile::Options& options) {
  int ends[2];
  if (::pipe(ends) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    const auto file = SwapFile::open(parent, options);
    file->reserve("k", 100000);
    [[maybe_unused]] const auto said = ::write(ends[1], "x", 1);
    while (true) ::pause();
  }
  char byte = 0;
  [[maybe_unused]] const auto got = ::read(ends[0], &byte, 1);
  ::close(ends[0]);
  ::close(ends[1]);
  return child;
}

void on_each_engine(const std::function<void(const SwapFile::Options&)>& body) {
  for (const std::string& name : engine_names()) {
    SwapFile::Options options;
    options.engine = name == "threads" ? SwapFile::Engine::threads : SwapFile::Engine::io_uring;
    body(options);
  }
}

void kill_and_reap(pid_t child) {
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

}  // namespace

TEST(SwapDirectory, private_while_open_and_gone_afterwards) {
  const TempDirectory temp;
  {
    const auto file = SwapFile::open(temp.path() + "/leaf", {});
    const fs::path own = fs::path(file->stats().path).parent_path();
    EXPECT_EQ(mode_of(temp.path() + "/leaf"), 0700u);
    EXPECT_EQ(mode_of(own), 0700u);
    EXPECT_EQ(mode_of(own / "lock"), 0600u);
    EXPECT_EQ(std::distance(fs::directory_iterator(own), fs::directory_iterator()), 1);  // only the lock
    struct stat data{};
    EXPECT_EQ(::stat(data_of(*file).c_str(), &data), 0);
    EXPECT_EQ(data.st_mode & 07777, 0600u);
    EXPECT_EQ(data.st_nlink, 0u);
    EXPECT_TRUE(file->stats().notes.empty() || file->stats().notes[0].find("keeps its name") == std::string::npos);
    EXPECT_TRUE(own.filename().string().starts_with("zcomm-swap-" + std::to_string(::getpid()) + "-"));
    std::ifstream lock(own / "lock");
    const std::string text((std::istreambuf_iterator<char>(lock)), {});
    for (const std::string& part :
         {"\"pid\": " + std::to_string(::getpid()), std::string("\"host\""), std::string("\"created\""),
          std::string("\"uid\""), std::string("\"start_ticks\""), std::string("\"boot_id\"")})
      EXPECT_TRUE(text.find(part) != std::string::npos);
  }
  EXPECT_TRUE(fs::is_empty(temp.path() + "/leaf"));
}

TEST(SwapDirectory, a_killed_owner_leaves_no_data) {
  on_each_engine([](const SwapFile::Options& options) {
    for (const int number : {SIGTERM, SIGKILL}) {
      const TempDirectory temp;
      const pid_t owner = start_owner(temp.path(), options);
      const fs::path own = temp.path() + "/" + temp.names().at(0);
      EXPECT_FALSE(fs::exists(own / "data"));
      ::kill(owner, number);
      ::waitpid(owner, nullptr, 0);
      EXPECT_EQ(std::distance(fs::directory_iterator(own), fs::directory_iterator()), 1);
      EXPECT_TRUE(fs::exists(own / "lock"));
      SwapFile::open(temp.path(), options)->close();
      EXPECT_TRUE(temp.names().empty());
    }
  });
}

TEST(SwapDirectory, space_is_free_when_the_owner_was_killed_or_has_closed) {
  on_each_engine([](const SwapFile::Options& options) {
    for (const int number : {SIGTERM, SIGKILL, 0}) {
      const TempDirectory temp;
      if (::mount("tmpfs", temp.path().c_str(), "tmpfs", 0, "size=8m") != 0) {
        std::cout << "     no right to mount: skipped\n";
        return;
      }
      const auto used = [&temp] { return fs::space(temp.path()).capacity - fs::space(temp.path()).free; };
      if (number != 0) {
        const pid_t owner = start_owner(temp.path(), options);
        EXPECT_TRUE(used() >= 100000u);
        ::kill(owner, number);
        ::waitpid(owner, nullptr, 0);
        EXPECT_TRUE(used() <= 16384u);  // the lock's
      } else {
        const auto file = SwapFile::open(temp.path(), options);
        file->reserve("k", 100000);
        EXPECT_TRUE(used() >= 100000u);
        file->close();
        EXPECT_EQ(used(), 0u);  // while the object is still there
        EXPECT_EQ(file->stats().file_nbytes, 102400u);
      }
      SwapFile::open(temp.path(), options)->close();
      EXPECT_TRUE(temp.names().empty());
      ::umount(temp.path().c_str());
    }
  });
}

TEST(SwapDirectory, a_file_that_keeps_its_name_works_is_said_and_goes_with_the_next_start) {
  on_each_engine([](const SwapFile::Options& options) {
    const TempDirectory temp;
    const int status = in_child([&] {
      if (!forbid(__NR_unlinkat, EBUSY)) return kSkipped;  // as on file systems that cannot unlink open files
      const auto file = SwapFile::open(temp.path(), options);
      const auto stats = file->stats();
      if (!fs::exists(stats.path)) return 1;
      if (stats.notes.empty() ||
          stats.notes.back().find("keeps its name (Device or resource busy)") == std::string::npos)
        return 2;
      Pattern out(100000, 1), in(100000, 2);
      file->write("k", out.data(), out.nbytes()).wait();
      file->read("k", in.data(), in.nbytes()).wait();
      ::kill(in == out ? ::getpid() : 0, SIGKILL);
      return 3;
    });
    if (status == kSkipped) return;
    EXPECT_EQ(status, 128 + SIGKILL);
    EXPECT_EQ(temp.names().size(), 1u);
    SwapFile::open(temp.path(), options)->close();
    EXPECT_TRUE(temp.names().empty());
  });
}

TEST(SwapDirectory, bad_places_are_named) {
  on_each_engine([](const SwapFile::Options& options) {
    const TempDirectory temp;
    std::ofstream(temp.path() + "/file") << "x";
    std::string what;
    EXPECT_EQ(error_of([&] { SwapFile::open(temp.path() + "/no/such", options); }, &what), ENOENT);
    EXPECT_TRUE(what.find("/no/such") != std::string::npos);
    EXPECT_EQ(error_of([&] { SwapFile::open(temp.path() + "/file", options); }), ENOTDIR);
    EXPECT_EQ(error_of([&] { SwapFile::open(temp.path() + "/file/below", options); }), ENOTDIR);
    EXPECT_EQ(error_of([&] { SwapFile::open("", options); }), -1);
  });
}

TEST(SwapDirectory, no_permission_is_eacces) {
  on_each_engine([](const SwapFile::Options& options) {
    const TempDirectory temp;
    fs::create_directory(temp.path() + "/locked");
    ::chmod(temp.path().c_str(), 0755);
    ::chmod((temp.path() + "/locked").c_str(), 0555);
    const int code = in_child([&] {
      if (::geteuid() == 0 && ::seteuid(65534) != 0) return 1;
      return error_of([&] { SwapFile::open(temp.path() + "/locked", options); });
    });
    EXPECT_EQ(code, EACCES);
  });
}

TEST(SwapDirectory, read_only_file_system_is_eacces_for_root_too) {
  on_each_engine([](const SwapFile::Options& options) {
    const TempDirectory temp;
    if (::mount("tmpfs", temp.path().c_str(), "tmpfs", MS_RDONLY, "size=1m") != 0) {
      std::cout << "     no right to mount: skipped\n";
      return;
    }
    std::string what;
    EXPECT_EQ(error_of([&] { SwapFile::open(temp.path(), options); }, &what), EACCES);
    EXPECT_TRUE(what.find("read-only") != std::string::npos);
    ::umount(temp.path().c_str());
  });
}

TEST(SwapDirectory, full_disk_is_enospc_at_reserve) {
  on_each_engine([](const SwapFile::Options& options) {
    const TempDirectory temp;
    if (::mount("tmpfs", temp.path().c_str(), "tmpfs", 0, "size=8m") != 0) {
      std::cout << "     no right to mount: skipped\n";
      return;
    }
    {
      const auto file = SwapFile::open(temp.path(), options);
      EXPECT_FALSE(file->stats().direct);  // memory has no direct I/O, and reports it
      file->reserve("a", 4 << 20);
      std::string what;
      EXPECT_EQ(error_of([&] { file->reserve("b", 5 << 20); }, &what), ENOSPC);
      for (const char* part : {"5242880 bytes more needed", "bytes free", "/data"})
        EXPECT_TRUE(what.find(part) != std::string::npos);
      EXPECT_EQ(file->stats().reserved_nbytes, 4u << 20);
      Pattern out(3 << 20, 1), in(3 << 20, 2);  // a key that fits still works
      file->write("c", out.data(), out.nbytes()).wait();
      file->read("c", in.data(), in.nbytes()).wait();
      EXPECT_TRUE(in == out);
      SwapFile::Options large = options;
      large.nbytes = 100 << 20;
      EXPECT_EQ(error_of([&] { SwapFile::open(temp.path(), large); }), ENOSPC);
      EXPECT_EQ(temp.names().size(), 1u);  // the refused one left nothing
    }
    EXPECT_TRUE(temp.names().empty());
    ::umount(temp.path().c_str());
  });
}

TEST(SwapDirectory, file_size_limit_is_enospc_and_no_signal) {
  on_each_engine([](const SwapFile::Options& options) {
    const TempDirectory temp;
    for (const rlim_t limit : {rlim_t{1} << 20, rlim_t{1000}}) {
      const int code = in_child([&] {
        const rlimit bound{limit, limit};
        ::setrlimit(RLIMIT_FSIZE, &bound);
        const auto file = SwapFile::open(temp.path(), options);
        if (limit > 300000) {
          Pattern out(300000, 1), in(300000, 2);
          file->write("a", out.data(), out.nbytes()).wait();
          file->read("a", in.data(), in.nbytes()).wait();
          if (!(in == out)) return 1;
        }
        std::string what;
        if (error_of([&] { file->reserve("b", 2 << 20); }, &what) != ENOSPC) return 2;
        return what.find("RLIMIT_FSIZE, ulimit -f) is " + std::to_string(limit)) == std::string::npos ? 3 : 0;
      });
      EXPECT_EQ(code, 0);
      EXPECT_TRUE(temp.names().empty());
    }
  });
}

TEST(SwapDirectory, the_dead_are_removed_and_the_living_stay) {
  on_each_engine([](const SwapFile::Options& options) {
    const TempDirectory temp;
    const pid_t dead = start_owner(temp.path(), options);
    const pid_t living = start_owner(temp.path(), options);
    kill_and_reap(dead);
    EXPECT_EQ(temp.names().size(), 2u);
    {
      const auto file = SwapFile::open(temp.path(), options);
      const auto names = temp.names();
      EXPECT_EQ(names.size(), 2u);
      for (const std::string& name : names) EXPECT_FALSE(name.starts_with("zcomm-swap-" + std::to_string(dead) + "-"));
    }
    EXPECT_EQ(temp.names().size(), 1u);
    kill_and_reap(living);
    SwapFile::open(temp.path(), options)->close();
    EXPECT_TRUE(temp.names().empty());
  });
}

TEST(SwapDirectory, nothing_else_is_touched) {
  const TempDirectory temp, elsewhere;
  const std::string stale = temp.path() + "/zcomm-swap-1-0123456789abcdef";
  const std::string linked = temp.path() + "/zcomm-swap-2-0123456789abcdef";
  const std::string no_lock = temp.path() + "/zcomm-swap-3-0123456789abcdef";
  const std::string link_lock = temp.path() + "/zcomm-swap-4-0123456789abcdef";
  const std::string empty = temp.path() + "/zcomm-swap-5-0123456789abcdef";
  const std::string fresh = temp.path() + "/.zcomm-swap-6-0123456789abcdef.new";
  const std::string other = temp.path() + "/zcomm-swap-mine";
  for (const auto& each : {stale, no_lock, link_lock, empty, fresh, other}) fs::create_directory(each);
  for (const auto& each : {stale, other, fresh, elsewhere.path()}) std::ofstream(each + "/lock") << "";
  for (const auto& each : {stale, no_lock, link_lock, other, elsewhere.path()}) std::ofstream(each + "/data") << "x";
  std::ofstream(stale + "/manifest.json") << "{}";  // of an earlier version
  std::ofstream(stale + "/notes.txt") << "another's";
  fs::create_directory_symlink(elsewhere.path(), linked);
  fs::create_symlink(elsewhere.path() + "/lock", link_lock + "/lock");
  SwapFile::open(temp.path(), {})->close();
  EXPECT_TRUE(fs::exists(stale + "/notes.txt"));  // our files in it are removed, the rest is kept
  EXPECT_FALSE(fs::exists(stale + "/data") || fs::exists(stale + "/manifest.json"));
  EXPECT_TRUE(fs::exists(elsewhere.path() + "/data"));
  EXPECT_TRUE(fs::exists(elsewhere.path() + "/lock"));
  for (const auto& each : {no_lock, link_lock, other}) EXPECT_TRUE(fs::exists(each + "/data"));
  EXPECT_TRUE(fs::exists(fresh));
  EXPECT_FALSE(fs::exists(empty));
}

TEST(SwapDirectory, a_forked_child_owns_nothing) {
  on_each_engine([](const SwapFile::Options& options) {
    const TempDirectory temp;
    auto file = SwapFile::open(temp.path(), options);
    Pattern out(100000, 1), in(100000, 2);
    file->write("k", out.data(), out.nbytes()).wait();
    const int code = in_child([&] {
      try {
        file->read("k", in.data(), in.nbytes());
        return 1;
      } catch (const Error& error) {
        if (std::string(error.what()).find("forked child") == std::string::npos) return 2;
      }
      file->close();
      file.reset();
      return 0;
    });
    EXPECT_EQ(code, 0);
    EXPECT_EQ(temp.names().size(), 1u);
    file->read("k", in.data(), in.nbytes()).wait();
    EXPECT_TRUE(in == out);
  });
}
