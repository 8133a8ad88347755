// Starting ranks (bench/cpp/world.hpp).
#include "world.hpp"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "zcomm/error.hpp"

namespace zcomm::bench {
namespace {

constexpr double kTimeoutS = 60;

void pin(int rank) {
  cpu_set_t all, one;
  if (::sched_getaffinity(0, sizeof(all), &all) != 0) return;
  int left = rank % CPU_COUNT(&all);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &all) || left-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ::sched_setaffinity(0, sizeof(one), &one);
    return;
  }
}

int be_rank(const Options& options, Rank& self, net::Listener listener, const std::vector<std::string>& addresses,
            const std::function<int(Rank&)>& body) {
  if (options.pin) pin(self.rank);
  self.mesh = net::Mesh::connect(self.rank, self.world_size, std::move(listener), addresses, "bench", kTimeoutS);
  self.comm = Communicator::create(self.mesh, {.timeout_s = kTimeoutS});
  const int code = body(self);
  self.comm->close();
  self.mesh->leave();
  return code;
}

int run_forked(const Options& options, const std::function<int(Rank&)>& body) {
  std::vector<net::Listener> listeners(static_cast<std::size_t>(options.world_size));
  std::vector<std::string> addresses;
  for (const auto& listener : listeners) addresses.push_back(listener.address());
  std::vector<pid_t> children;
  const pid_t parent = ::getpid();
  for (int r = 0; r < options.world_size; ++r) {
    const pid_t child = ::fork();
    if (child < 0) throw Error("fork failed");
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    int code = 2;
    try {
      Rank self{r, options.world_size, nullptr, nullptr, nullptr};
      net::Listener own = std::move(listeners[static_cast<std::size_t>(r)]);
      listeners.clear();
      code = be_rank(options, self, std::move(own), addresses, body);
    } catch (const std::exception& error) {
      std::cerr << "rank " << r << ": " << error.what() << std::endl;
    }
    std::cout << std::flush;
    ::_exit(code);
  }
  listeners.clear();
  int code = 0;
  for (std::size_t left = children.size(); left > 0; --left) {
    int status = 0;
    const pid_t ended = ::wait(&status);
    std::erase(children, ended);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    if (code == 0) code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    ::usleep(500'000);  // the others notice and print it
    for (const pid_t child : children) ::kill(child, SIGKILL);
  }
  return code;
}

}  // namespace

int run_ranks(const Options& options, const std::function<int(Rank&)>& body) {
  std::unique_ptr<MpiPeer> mpi = MpiPeer::start();
  if (!mpi) return run_forked(options, body);
  Rank self{mpi->rank(), mpi->world_size(), std::move(mpi), nullptr, nullptr};
  net::Listener listener;
  const std::vector<std::string> addresses = self.mpi->all_gather(listener.address());
  return be_rank(options, self, std::move(listener), addresses, body);
}

}  // namespace zcomm::bench
