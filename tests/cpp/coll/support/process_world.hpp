// Worlds of processes for the communicator's tests.
//
// Children are forked before any thread exists and report by exit code: 0 good, 1 wrong, 2 an unexpected error.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "coll/support/comm_world.hpp"
#include "coll/support/tcp_world.hpp"

namespace zcomm::test {

/// Runs `body` (true: all right) in `world` processes; returns their exit codes, or -signal. `join` makes a rank of a
/// child; `forget` drops the parent's copies of their objects.
inline std::vector<int> run_processes(int world, const std::function<Rank(int)>& join,
                                      const std::function<void()>& forget, const std::function<bool(Rank&)>& body) {
  std::vector<pid_t> children;
  std::cout << std::flush;
  for (int r = 0; r < world; ++r) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 2;
      try {
        Rank self = join(r);
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
  forget();
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return codes;
}

/// On one host, over shared memory.
inline std::vector<int> run_processes(int world, CommOptions options, const std::function<bool(Rank&)>& body) {
  Listeners listeners(world);
  const auto make = [&](int r) {
    Rank self{r, world, join(listeners, r), nullptr};
    listeners.all.clear();
    self.comm = Communicator::create(self.mesh, options);
    return self;
  };
  return run_processes(world, make, [&] { listeners.all.clear(); }, body);
}

inline std::vector<int> run_processes(int world, double timeout_s, const std::function<bool(Rank&)>& body) {
  return run_processes(world, small_slots(timeout_s), body);
}

/// Joined only by sockets.
inline std::vector<int> run_link_processes(int world, TcpWorld with, const std::function<bool(Rank&)>& body) {
  Cables cables(world, with.sockets, with.wire);
  const auto make = [&](int r) {
    Rank self{r, world, cables.adopt(r), nullptr};
    self.comm = cables.create(self.mesh, with.options);
    cables = Cables(0, 0);  // or the death of a rank would end no connection
    return self;
  };
  return run_processes(world, make, [&] { cables = Cables(0, 0); }, body);
}

}  // namespace zcomm::test
