// Worlds of threads that pretend to be ranks on several hosts.
#pragma once

#include <barrier>

#include "coll/hierarchical/engine.hpp"
#include "coll/support/tcp_world.hpp"

namespace zcomm::test {

/// Cables between hosts, and a mesh with listeners for each host.
struct Hosts {
  std::vector<int> of_rank;
  Cables cables;
  std::vector<std::unique_ptr<Listeners>> listeners;
  bool messages;

  explicit Hosts(std::vector<int> host_of_rank, bool with_messages = true)
      : of_rank(std::move(host_of_rank)), cables(static_cast<int>(of_rank.size()), 3), messages(with_messages) {
    for (int host = 0; host <= *std::max_element(of_rank.begin(), of_rank.end()); ++host)
      listeners.push_back(
          std::make_unique<Listeners>(static_cast<int>(std::count(of_rank.begin(), of_rank.end(), host))));
  }
  int place(int rank) const {
    return static_cast<int>(
        std::count(of_rank.begin(), of_rank.begin() + rank, of_rank[static_cast<std::size_t>(rank)]));
  }
  std::shared_ptr<net::Mesh> join_host(int rank) {
    return join(*listeners[static_cast<std::size_t>(of_rank[static_cast<std::size_t>(rank)])], place(rank));
  }
  /// Keeps one link, or none, to ranks with another local rank.
  std::vector<coll::PeerSockets> links(int rank) {
    auto own = std::move(cables.links[static_cast<std::size_t>(rank)]);
    for (int other = 0; other < static_cast<int>(own.size()); ++other)
      if (other != rank && place(other) != place(rank)) own[static_cast<std::size_t>(other)].resize(messages ? 1 : 0);
    return own;
  }
};

struct HierarchicalRank : Rank {
  std::shared_ptr<net::Mesh> host_mesh;
  void die() {
    mesh->drop_dead();
    host_mesh->drop_dead();
  }
};

constexpr std::size_t kSmallPieces = 8192;  // of an all_reduce, so that modest buffers have several

inline void run_hosts(const std::vector<int>& host_of_rank, double timeout_s,
                      const std::function<void(HierarchicalRank&)>& body, bool messages = true,
                      std::size_t piece_nbytes = kSmallPieces) {
  const int world = static_cast<int>(host_of_rank.size());
  Hosts hosts(host_of_rank, messages);
  std::barrier created(world);  // a rank that dies in `body` must not end another's creation
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      bool arrived = false;
      try {
        HierarchicalRank self{{r, world, nullptr, nullptr}, nullptr};
        self.mesh = hosts.cables.adopt(r);
        self.host_mesh = hosts.join_host(r);
        self.comm = coll::create_hierarchical(self.mesh, self.host_mesh, hosts.of_rank, hosts.links(r),
                                              {{timeout_s, 1024}, 4096, 4, piece_nbytes});
        arrived = true;
        created.arrive_and_wait();
        body(self);
        if (self.comm) self.comm->close();
        self.mesh->leave();
        self.host_mesh->leave();
      } catch (const std::exception& error) {
        if (!arrived) created.arrive_and_drop();
        fail(__FILE__, __LINE__, "rank " + std::to_string(r) + " of " + std::to_string(world) + ": " + error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace zcomm::test
