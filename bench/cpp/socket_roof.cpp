// socket_roof [nbytes] [ranks]: rate of 1, 2, 4, 8 and 16 raw sockets over loopback, both directions at once.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <vector>

#include "socket_ring.hpp"

using zcomm::bench::SocketRing;

namespace {

constexpr int kRounds = 9;

double median_s(SocketRing& ring, std::size_t nbytes, int threads) {
  std::vector<double> seconds;
  for (int round = 0; round < kRounds; ++round) {
    ring.run(1, 1);  // all are here
    const auto begin = std::chrono::steady_clock::now();
    ring.run(nbytes, threads);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + kRounds / 2, seconds.end());
  return seconds[kRounds / 2];
}

void sweep(int rank, int world_size, std::size_t nbytes, int sockets, SocketRing& ring, const std::vector<int>& ports) {
  ring.connect(rank, world_size, sockets, ports);
  const double one = median_s(ring, nbytes, 1), two = median_s(ring, nbytes, 2);
  if (rank == 0)
    std::printf("%2d sockets: one thread %7.2f ms %6.2f GB/s, sender and receiver %7.2f ms %6.2f GB/s\n", sockets,
                1e3 * one, 1e-9 * static_cast<double>(nbytes) / one, 1e3 * two,
                1e-9 * static_cast<double>(nbytes) / two);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t nbytes = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 64 << 20;
  const int world_size = argc > 2 ? std::atoi(argv[2]) : 2;
  if (nbytes == 0 || world_size < 2) {
    std::fprintf(stderr, "usage: socket_roof [nbytes > 0] [ranks >= 2]\n");
    return 2;
  }
  std::printf("# each of %d ranks sends and receives %zu bytes over loopback; rank 0's median of %d\n", world_size,
              nbytes, kRounds);
  std::fflush(stdout);
  int code = 0;
  for (const int sockets : {1, 2, 4, 8, 16}) {
    std::vector<std::unique_ptr<SocketRing>> rings;
    std::vector<int> ports;
    for (int r = 0; r < world_size; ++r) {
      rings.push_back(std::make_unique<SocketRing>());
      ports.push_back(rings.back()->port());
    }
    for (int r = 0; r < world_size; ++r) {
      if (::fork() != 0) continue;
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        sweep(r, world_size, nbytes, sockets, *rings[static_cast<std::size_t>(r)], ports);
        ::_exit(0);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", r, error.what());
        ::_exit(1);
      }
    }
    int status = 0;
    while (::wait(&status) > 0) code |= status != 0;
  }
  return code;
}
