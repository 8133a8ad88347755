// The threads of swap files: named, with all of the program's signals blocked (SIGXFSZ included), refused with a typed
// error.
//
// Thread rule: pure function.
#pragma once

#include <pthread.h>

#include <csignal>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.hpp"

namespace zcomm::mem {

/// Throws SystemError (EAGAIN) if the system refuses another thread.
template <class Body>
std::thread start_io_thread(const char* name, Body body) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    const sigset_t& mask;
    ~Restore() { ::pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
  } restore{before};
  try {
    return std::thread([name, body = std::move(body)] {
      ::pthread_setname_np(::pthread_self(), name);
      body();
    });
  } catch (const std::system_error& error) {
    const int code = error.code().value();
    throw_system_error(code, "SwapFile: cannot start a thread (RLIMIT_NPROC, ulimit -u, or a container's pids limit)");
  }
}

}  // namespace zcomm::mem
