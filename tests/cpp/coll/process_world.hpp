// Worlds of processes for the communicator's tests.
//
// Children are forked before any thread exists and report by exit code: 0 good, 1 wrong, 2 an unexpected error.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "comm_world.hpp"

namespace zcomm::test {

/// Runs `body` (true: all right) in `world` processes; returns their exit codes, or -signal.
inline std::vector<int> run_processes(int world, CommOptions options, const std::function<bool(Rank&)>& body) {
  Listeners listeners(world);
  std::vector<pid_t> children;
  std::cout << std::flush;
  for (int r = 0; r < world; ++r) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 2;
      try {
        Rank self{r, world, join(listeners, r), nullptr};
        listeners.all.clear();
        self.comm = Communicator::create(self.mesh, options);
        code = body(self) ? 0 : 1;
        self.comm->close();
        self.mesh->leave();
      } catch (const std::exception& error) {
        std::cerr << "rank " << r << ": " << error.what() << std::endl;
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  listeners.all.clear();
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return codes;
}

inline std::vector<int> run_processes(int world, double timeout_s, const std::function<bool(Rank&)>& body) {
  return run_processes(world, small_slots(timeout_s), body);
}

}  // namespace zcomm::test
