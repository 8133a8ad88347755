// Raw sockets between ring neighbours: the roof of everything that goes over TCP.
//
// Each rank has S connections to the next rank and S from the one before (two ranks: S in all), full duplex. A run
// sends and receives `nbytes` per rank, dealt evenly to all connections and both directions, from and into buffers that
// do not change: nothing is reduced, framed or checked.
// Thread rule: one thread calls. run() is collective.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace zcomm::bench {

class SocketRing {
 public:
  SocketRing();
  ~SocketRing();
  SocketRing(const SocketRing&) = delete;
  SocketRing& operator=(const SocketRing&) = delete;

  /// Where this rank listens, on the loopback interface.
  int port() const { return port_; }
  /// `ports`: of all ranks. Collective.
  void connect(int rank, int world_size, int sockets, std::span<const int> ports);
  /// threads 1: one thread serves all sockets, both ways; 2: one sends, one receives.
  void run(std::size_t nbytes, int threads);

 private:
  int listener_ = -1, port_ = 0;
  std::vector<int> sockets_;
  std::vector<std::byte> out_, in_;
};

}  // namespace zcomm::bench
