// Liveness: deaths and goodbyes are noticed and distinguished, callbacks can be forgotten, forked children are
// harmless.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

#include "net/world.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::test;
using net::Fate;
using net::Loss;
using net::Mesh;

namespace {

std::vector<std::shared_ptr<Mesh>> connected(int world_size) {
  Lobby lobby(world_size);
  std::vector<std::shared_ptr<Mesh>> meshes(static_cast<std::size_t>(world_size));
  run_ranks(world_size, [&](int rank) { meshes[static_cast<std::size_t>(rank)] = lobby.connect(rank); });
  return meshes;
}

void expect_loss(const Mesh& mesh, int rank, Fate fate) {
  EXPECT_TRUE(eventually([&] { return mesh.fate(rank) != Fate::alive; }));
  EXPECT_TRUE(mesh.fate(rank) == fate);
}

/// A rank in a process of its own, forked while this process has one thread; ended and reaped at the end.
struct ChildRank {
  template <class Body>
  explicit ChildRank(Body body) : pid(::fork()) {
    if (pid != 0) return;
    try {
      body();
    } catch (const std::exception& error) {
      fail("child", 0, error.what());
    }
    ::_exit(1);
  }
  ~ChildRank() { kill_and_reap(); }
  void kill_and_reap() {
    if (pid <= 0) return;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    pid = 0;
  }
  pid_t pid;
};

}  // namespace

TEST(Liveness, death_is_told_to_everyone) {
  for (int world_size = 2; world_size <= 5; ++world_size) {
    const auto meshes = connected(world_size);
    const int victim = world_size / 2;
    meshes[static_cast<std::size_t>(victim)]->drop_dead();
    for (const auto& mesh : meshes) {
      if (mesh->rank() == victim) continue;
      expect_loss(*mesh, victim, Fate::died);
      const auto first = mesh->lost();
      EXPECT_TRUE(first && first->rank == victim);
      EXPECT_TRUE(mesh->fate(mesh->rank()) == Fate::alive);
      EXPECT_THROW_WITH(mesh->exchange({}, kPatience_s), PeerLost, "rank " + std::to_string(victim));
    }
    EXPECT_THROW_WITH(meshes[static_cast<std::size_t>(victim)]->exchange({}, 1), Error, "has left");
  }
}

TEST(Liveness, goodbye_is_no_death) {
  const auto meshes = connected(3);
  meshes[2]->leave();
  meshes[2]->leave();
  meshes[2]->drop_dead();
  expect_loss(*meshes[0], 2, Fate::left);
  expect_loss(*meshes[1], 2, Fate::left);
  EXPECT_THROW_WITH(meshes[0]->exchange({}, kPatience_s), PeerLost, "rank 2 left");
  EXPECT_TRUE(meshes[0]->fate(1) == Fate::alive);
  EXPECT_TRUE(meshes[0]->fate(7) == Fate::alive);
  EXPECT_TRUE(meshes[0]->fate(-1) == Fate::alive);
}

TEST(Liveness, a_death_ends_a_waiting_exchange) {
  const auto meshes = connected(3);
  std::atomic<int> named{-1};
  std::thread waiting([&] {
    try {
      meshes[0]->exchange({}, kPatience_s);
    } catch (const PeerLost& error) {
      named = error.rank;
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  meshes[1]->drop_dead();
  waiting.join();
  EXPECT_EQ(named.load(), 1);
}

TEST(Liveness, callbacks_hear_each_loss_until_forgotten) {
  const auto meshes = connected(4);
  std::atomic<int> heard{0}, forgotten{0};
  meshes[0]->on_loss([&](Loss loss) { heard += 1 << (4 * loss.rank + (loss.fate == Fate::left ? 1 : 0)); });
  const int id = meshes[0]->on_loss([&](Loss) { ++forgotten; });
  meshes[3]->leave();
  EXPECT_TRUE(eventually([&] { return heard == 1 << 13 && forgotten == 1; }));
  meshes[0]->forget(id);
  meshes[1]->drop_dead();
  EXPECT_TRUE(eventually([&] { return heard == (1 << 13) + (1 << 4); }));
  EXPECT_EQ(forgotten.load(), 1);
  const auto first = meshes[0]->lost();
  EXPECT_TRUE(first && first->rank == 3 && first->fate == Fate::left);
}

TEST(Liveness, forget_waits_for_a_running_callback) {
  const auto meshes = connected(2);
  std::atomic<bool> entered{false}, finished{false};
  const int id = meshes[0]->on_loss([&](Loss) {
    entered = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    finished = true;
  });
  meshes[1]->drop_dead();
  EXPECT_TRUE(eventually([&] { return entered.load(); }));
  meshes[0]->forget(id);
  EXPECT_TRUE(finished.load());
}

TEST(Liveness, a_callback_may_forget_leave_and_destroy) {
  const int before = open_descriptors();
  auto meshes = connected(2);
  std::atomic<bool> done{false};
  std::atomic<int> id{-1};
  std::mutex ready;
  {
    const std::lock_guard lock(ready);
    id = meshes[0]->on_loss([&](Loss) {
      {
        const std::lock_guard wait(ready);
      }
      meshes[0]->forget(id);
      meshes[0]->leave();
      meshes[0].reset();  // the last owner: the mesh dies on its own thread
      done = true;
    });
  }
  meshes[1]->drop_dead();
  EXPECT_TRUE(eventually([&] { return done.load(); }));
  meshes.clear();
  EXPECT_TRUE(eventually([&] { return open_descriptors() == before; }));
}

TEST(Liveness, descriptors_return) {
  const int before = open_descriptors();
  {
    const auto meshes = connected(5);
    meshes[0]->leave();
    meshes[1]->drop_dead();
    expect_loss(*meshes[4], 0, Fate::left);
  }
  EXPECT_TRUE(eventually([&] { return open_descriptors() == before; }));
}

TEST(Liveness, a_killed_process_is_noticed) {
  Lobby lobby(3);
  ChildRank one([&] {
    const auto mesh = lobby.connect(1);
    for (int i = 0; i < 2; ++i) mesh->exchange({}, kPatience_s);
    ::pause();
  });
  ChildRank two([&] {
    const auto mesh = lobby.connect(2);
    mesh->exchange({}, kPatience_s);
    try {
      mesh->exchange({}, kPatience_s);
    } catch (const PeerLost& error) {  // rank 0 may be done, and rank 1 killed, before this rank is
      EXPECT_EQ(error.rank, 1);
    }
    expect_loss(*mesh, 1, Fate::died);
    mesh->leave();
    ::_exit(0);
  });
  const auto mesh = lobby.connect(0);
  for (int i = 0; i < 2; ++i) mesh->exchange({}, kPatience_s);
  EXPECT_FALSE(mesh->lost().has_value());
  one.kill_and_reap();
  EXPECT_TRUE(eventually([&] { return mesh->fate(1) != Fate::alive; }, 1.0));
  expect_loss(*mesh, 1, Fate::died);
  expect_loss(*mesh, 2, Fate::left);  // it had noticed too, and left in order
}

TEST(Liveness, a_killed_process_is_noticed_though_its_child_lives_on) {
  // A data loader's worker inherits its parent's sockets by fork and keeps them open.
  Lobby lobby(2);
  int pipe_ends[2];
  EXPECT_EQ(::pipe(pipe_ends), 0);
  ChildRank one([&] {
    const auto mesh = lobby.connect(1);
    const pid_t worker = ::fork();
    if (worker == 0) {
      ::pause();
      ::_exit(0);
    }
    (void)!::write(pipe_ends[1], &worker, sizeof worker);
    mesh->exchange({}, kPatience_s);
    ::pause();
  });
  const auto mesh = lobby.connect(0);
  mesh->exchange({}, kPatience_s);
  pid_t worker = 0;
  EXPECT_EQ(::read(pipe_ends[0], &worker, sizeof worker), static_cast<ssize_t>(sizeof worker));
  one.kill_and_reap();
  EXPECT_TRUE(eventually([&] { return mesh->fate(1) != Fate::alive; }, 1.0));
  expect_loss(*mesh, 1, Fate::died);
  EXPECT_THROW_WITH(mesh->exchange({}, kPatience_s), PeerLost, "rank 1");
  if (worker > 0) ::kill(worker, SIGKILL);
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
}

TEST(Liveness, a_forked_child_does_not_speak_for_its_parent) {
  Lobby lobby(2);
  const int failed_before = failures();
  ChildRank one([&] {
    auto mesh = lobby.connect(1);
    const pid_t worker = ::fork();
    if (worker == 0) {
      int wrong = 1;
      try {
        mesh->exchange({}, 1.0);
      } catch (const Error& error) {
        wrong = std::string(error.what()).find("forked") == std::string::npos;
      }
      mesh->leave();
      mesh.reset();
      ::_exit(wrong);
    }
    int status = -1;
    ::waitpid(worker, &status, 0);
    if (status != 0) ::_exit(1);
    mesh->exchange({}, kPatience_s);
    expect_loss(*mesh, 0, Fate::left);  // its own monitor still watches
    mesh->leave();
    ::_exit(failures() == failed_before ? 0 : 1);
  });
  const auto mesh = lobby.connect(0);
  EXPECT_EQ(mesh->exchange({}, kPatience_s).size(), std::size_t{2});
  EXPECT_FALSE(mesh->lost().has_value());
  mesh->leave();
  int status = -1;
  ::waitpid(one.pid, &status, 0);
  one.pid = 0;
  EXPECT_EQ(status, 0);
}
