// Worlds of ranks that are joined only by sockets, each rank a thread.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "coll/support/comm_world.hpp"
#include "coll/tcp/engine.hpp"
#include "net/socket.hpp"

namespace zcomm::test {

enum class Wire { unix_, tcp };

inline std::pair<UniqueFd, UniqueFd> make_tcp_pair() {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t nbytes = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), generic, nbytes) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), generic, &nbytes) != 0)
    throw Error("no loopback listener");
  UniqueFd a(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(a.get(), generic, nbytes) != 0) throw Error("no loopback connection");
  return {std::move(a), UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))};
}

inline std::pair<UniqueFd, UniqueFd> make_wire(Wire wire) {
  return wire == Wire::tcp ? make_tcp_pair() : net::make_socket_pair();
}

/// Sockets between all ranks: for the mesh, and `count` links per pair.
struct Cables {
  std::vector<std::vector<net::AdoptedSockets>> mesh;  // [rank][peer]
  std::vector<std::vector<coll::PeerSockets>> links;

  Cables(int world, std::size_t count, Wire wire = Wire::unix_)
      : mesh(static_cast<std::size_t>(world)), links(static_cast<std::size_t>(world)) {
    const auto ranks = static_cast<std::size_t>(world);
    for (std::size_t r = 0; r < ranks; ++r) mesh[r].resize(ranks), links[r].resize(ranks);
    for (std::size_t a = 0; a < ranks; ++a) {
      for (std::size_t b = a + 1; b < ranks; ++b) {
        std::tie(mesh[a][b].data, mesh[b][a].data) = make_wire(wire);
        std::tie(mesh[a][b].control, mesh[b][a].control) = make_wire(wire);
        for (std::size_t i = 0; i < count; ++i) {
          auto [one, other] = make_wire(wire);
          links[a][b].push_back(std::move(one));
          links[b][a].push_back(std::move(other));
        }
      }
    }
  }
  std::shared_ptr<net::Mesh> adopt(int rank) {
    return net::Mesh::adopt(rank, std::move(mesh[static_cast<std::size_t>(rank)]));
  }
  std::unique_ptr<Communicator> create(std::shared_ptr<net::Mesh> over, coll::TcpOptions options) {
    auto& own = links[static_cast<std::size_t>(over->rank())];
    return coll::create_linked(std::move(over), std::move(own), options);
  }
};

struct TcpWorld {
  coll::TcpOptions options{30, 1024};  // small segments, so that modest buffers take many
  std::size_t sockets = 3;
  Wire wire = Wire::unix_;
};

/// Runs `body` as each rank of a world of threads. Errors that leave it fail the test.
inline void run_link_world(int world, TcpWorld with, const std::function<void(Rank&)>& body) {
  Cables cables(world, with.sockets, with.wire);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank self{r, world, cables.adopt(r), nullptr};
        self.comm = cables.create(self.mesh, with.options);
        body(self);
        if (self.comm) self.comm->close();
        self.mesh->leave();
      } catch (const std::exception& error) {
        fail(__FILE__, __LINE__, "rank " + std::to_string(r) + " of " + std::to_string(world) + ": " + error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace zcomm::test
