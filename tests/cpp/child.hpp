// A forked child that runs a part of a test.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

namespace zcomm::test {

/// Runs `body` in a forked child and returns its exit status (128 + signal when killed by one).
template <class Body>
int in_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = body();
    } catch (...) {
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace zcomm::test
