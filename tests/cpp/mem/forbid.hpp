// Makes system calls of this process fail permanently by a seccomp filter: for children that fork for one test.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>

namespace zcomm::test {

/// Values of a system call's second argument (io_uring_enter: the number of requests to submit).
struct SecondArgument {
  unsigned least = 0, most = std::numeric_limits<unsigned>::max();
};

/// From now on the system call `number` fails with `code` (0: it does nothing and returns 0) in all threads of this
/// process, if its second argument lies in the given range. False if filters are forbidden.
inline bool forbid(long number, int code, SecondArgument where = {}) {
  const auto second = static_cast<unsigned>(offsetof(seccomp_data, args) + sizeof(std::uint64_t));  // its low half
  const auto call = static_cast<unsigned>(number);
  const unsigned refuse = SECCOMP_RET_ERRNO | static_cast<unsigned>(code);
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, second),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, where.least, 0, 2),
      BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, where.most, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, refuse),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) == 0;
}

inline constexpr int kSkipped = 77;

}  // namespace zcomm::test
