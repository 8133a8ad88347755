// SwapOwner: looks up the process that a lock file names, if a free lock does not prove that it has ended.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <string>

#include "mem/swap_owner.hpp"
#include "mem_test.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

/// `record` with another value of a field; `quoted` as in the record.
std::string with(std::string record, const std::string& name, const std::string& value) {
  const std::size_t begin = record.find("\"" + name + "\": ") + name.size() + 4;
  const std::size_t end = record.find_first_of(",}", begin);
  return record.replace(begin, end - begin, value);
}

std::string without(std::string record, const std::string& name) {
  const std::size_t begin = record.find("\"" + name + "\": ");
  return record.erase(begin, record.find(", ", begin) + 2 - begin);
}

/// The record of a child that lives until it is killed.
pid_t start_owner(std::string& record) {
  int ends[2];
  if (::pipe(ends) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string own = mem::owner_record(0, 1);
    [[maybe_unused]] const auto said = ::write(ends[1], own.data(), own.size());
    while (true) ::pause();
  }
  record.resize(1024);
  record.resize(static_cast<std::size_t>(::read(ends[0], record.data(), record.size())));
  ::close(ends[0]);
  ::close(ends[1]);
  return child;
}

}  // namespace

TEST(SwapOwner, lives_until_its_process_ends) {
  std::string record;
  const pid_t owner = start_owner(record);
  EXPECT_FALSE(mem::owner_is_gone(record));
  ::kill(owner, SIGKILL);
  ::waitpid(owner, nullptr, 0);
  EXPECT_TRUE(mem::owner_is_gone(record));
}

TEST(SwapOwner, a_later_process_with_its_number_is_another) {
  const std::string record = mem::owner_record(0, 1);
  EXPECT_FALSE(mem::owner_is_gone(record));
  EXPECT_TRUE(mem::owner_is_gone(with(record, "start_ticks", "1")));
}

TEST(SwapOwner, one_that_cannot_be_asked_counts_as_living) {
  const std::string gone = with(mem::owner_record(0, 1), "start_ticks", "1");
  EXPECT_TRUE(mem::owner_is_gone(gone));
  EXPECT_FALSE(mem::owner_is_gone(with(gone, "boot_id", "\"another\"")));  // another machine, or before a reboot
  EXPECT_FALSE(mem::owner_is_gone(with(gone, "pid_namespace", "7")));      // another container
  EXPECT_TRUE(mem::owner_is_gone(with(gone, "host", "\"renamed\"")));
  for (const std::string& damaged : {std::string(), std::string("{}"), with(gone, "pid", ""), with(gone, "pid", "../1"),
                                     with(gone, "start_ticks", ""), std::string("\"pid\": 1")})
    EXPECT_FALSE(mem::owner_is_gone(damaged));
}

TEST(SwapOwner, records_of_earlier_versions_name_a_host) {
  const std::string record = without(without(mem::owner_record(0, 1), "boot_id"), "pid_namespace");
  EXPECT_FALSE(mem::owner_is_gone(record));
  EXPECT_TRUE(mem::owner_is_gone(with(record, "start_ticks", "1")));
  EXPECT_FALSE(mem::owner_is_gone(with(with(record, "start_ticks", "1"), "host", "\"another\"")));
}

TEST(SwapOwner, locks_are_proof_on_this_machines_own_file_systems) {
  const TempDirectory temp;
  std::ofstream(temp.path() + "/file") << "x";
  int fds[] = {::open(temp.path().c_str(), O_RDONLY | O_CLOEXEC), ::open("/proc/self/stat", O_RDONLY | O_CLOEXEC), -1};
  EXPECT_TRUE(mem::locks_are_proof(fds[0]));
  EXPECT_FALSE(mem::locks_are_proof(fds[1]));  // whatever it is, it is not known as one
  EXPECT_FALSE(mem::locks_are_proof(fds[2]));
  for (const int fd : fds) ::close(fd);
}
