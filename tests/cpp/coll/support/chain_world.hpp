// Worlds of ranks with two communicators each, as a gradient's chain of sums has them: `inside` joins the ranks of one
// group over shared memory, `across` the ranks with one place in their groups over links. Each rank is a thread.
#pragma once

#include "coll/support/tcp_world.hpp"

namespace zcomm::test {

/// Sockets of all groups and of all rows across them.
struct Groups {
  int groups, size;
  std::vector<std::unique_ptr<Listeners>> inside;  // by group
  std::vector<Cables> across;                      // by place

  Groups(int group_count, int group_size) : groups(group_count), size(group_size) {
    for (int g = 0; g < groups; ++g) inside.push_back(std::make_unique<Listeners>(size));
    for (int p = 0; p < size; ++p) across.emplace_back(groups, 3);
  }
};

struct ChainRank {
  int rank, groups, size;
  std::shared_ptr<net::Mesh> inside_mesh, across_mesh;
  std::unique_ptr<Communicator> inside, across;

  int world() const { return groups * size; }
  int group() const { return rank / size; }
  int place() const { return rank % size; }
  /// As the death of its process looks to the others.
  void die() {
    inside_mesh->drop_dead();
    across_mesh->drop_dead();
    inside->close();
    across->close();
  }
};

/// Runs `body` as each rank of `groups` * `size`. Errors that leave it fail the test.
inline void run_chains(int groups, int size, double timeout_s, const std::function<void(ChainRank&)>& body) {
  Groups all(groups, size);
  std::vector<std::thread> threads;
  for (int r = 0; r < groups * size; ++r) {
    threads.emplace_back([&, r] {
      try {
        ChainRank self{r, groups, size, nullptr, nullptr, nullptr, nullptr};
        self.inside_mesh = join(*all.inside[static_cast<std::size_t>(self.group())], self.place());
        self.inside = Communicator::create(self.inside_mesh, small_slots(timeout_s));
        Cables& cables = all.across[static_cast<std::size_t>(self.place())];
        self.across_mesh = cables.adopt(self.group());
        self.across = cables.create(self.across_mesh, {timeout_s, 1024});
        body(self);
        self.inside->close();
        self.across->close();
        self.inside_mesh->leave();
        self.across_mesh->leave();
      } catch (const std::exception& error) {
        fail(__FILE__, __LINE__, "rank " + std::to_string(r) + ": " + error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace zcomm::test
