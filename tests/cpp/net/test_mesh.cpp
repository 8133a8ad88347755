// Mesh: connecting and exchanging bytes and descriptors, in worlds of threads and of processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "net/mesh.hpp"
#include "net/world.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::test;
using net::Mesh;
using net::Parcel;

namespace {

UniqueFd file_holding(int number) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(::pwrite(fd.get(), &number, sizeof number, 0), static_cast<ssize_t>(sizeof number));
  return fd;
}

int number_in(const UniqueFd& fd) {
  int number = -1;
  EXPECT_EQ(::pread(fd.get(), &number, sizeof number, 0), static_cast<ssize_t>(sizeof number));
  return number;
}

std::string message(int rank, int round) {
  return std::string(static_cast<std::size_t>(rank * 7 + round), static_cast<char>('a' + rank)) + std::to_string(round);
}

}  // namespace

TEST(Mesh, exchanges_bytes_and_descriptors) {
  const int before = open_descriptors();
  for (int world_size = 1; world_size <= 9; ++world_size) {
    run_world(world_size, [world_size](Mesh& mesh) {
      EXPECT_EQ(mesh.world_size(), world_size);
      for (int round = 0; round < 5; ++round) {
        const auto with_fd = [round](int rank) { return (rank + round) % 2 == 0; };
        Parcel mine{bytes_of(message(mesh.rank(), round)), {}};
        if (with_fd(mesh.rank())) mine.fd = file_holding(mesh.rank() * 100 + round);
        const std::vector<Parcel> parcels = mesh.exchange(std::move(mine), kPatience_s);
        EXPECT_EQ(parcels.size(), static_cast<std::size_t>(world_size));
        for (int rank = 0; rank < world_size; ++rank) {
          const Parcel& parcel = parcels[static_cast<std::size_t>(rank)];
          EXPECT_EQ(string_of(parcel.bytes), message(rank, round));
          EXPECT_EQ(static_cast<bool>(parcel.fd), with_fd(rank));
          if (!parcel.fd) continue;
          EXPECT_EQ(number_in(parcel.fd), rank * 100 + round);
          EXPECT_NE(::fcntl(parcel.fd.get(), F_GETFD) & FD_CLOEXEC, 0);
        }
      }
      EXPECT_FALSE(mesh.lost().has_value());
    });
    EXPECT_EQ(open_descriptors(), before);
  }
}

TEST(Mesh, exchanges_more_than_a_socket_holds) {
  run_world(3, [](Mesh& mesh) {
    for (const std::size_t nbytes : {std::size_t{0}, std::size_t{3'000'001}}) {
      Parcel mine{std::vector<std::byte>(nbytes, static_cast<std::byte>(mesh.rank() + 1)), file_holding(mesh.rank())};
      const auto parcels = mesh.exchange(std::move(mine), kPatience_s);
      for (int rank = 0; rank < 3; ++rank) {
        const Parcel& parcel = parcels[static_cast<std::size_t>(rank)];
        EXPECT_TRUE(parcel.bytes == std::vector<std::byte>(nbytes, static_cast<std::byte>(rank + 1)));
        EXPECT_EQ(number_in(parcel.fd), rank);
      }
    }
  });
}

TEST(Mesh, late_rank_is_named_and_later_calls_fail) {
  run_world(3, [](Mesh& mesh) {
    if (mesh.rank() == 1) return;
    EXPECT_THROW_WITH(mesh.exchange({}, 0.05), Timeout, "rank 1");
    EXPECT_THROW_WITH(mesh.exchange({}, 0.05), Error, "rank 1");
  });
}

TEST(Mesh, exchanges_out_of_step_are_noticed) {
  Lobby lobby(2);
  std::vector<std::shared_ptr<Mesh>> meshes(2);
  run_ranks(2, [&](int rank) { meshes[static_cast<std::size_t>(rank)] = lobby.connect(rank); });
  EXPECT_THROW(meshes[0]->exchange({}, 0.01), Timeout);
  // Rank 1 completes its exchange 0 with rank 0's parcel; its exchange 1 then finds no peer.
  EXPECT_EQ(meshes[1]->exchange({}, kPatience_s).size(), std::size_t{2});
  EXPECT_THROW_WITH(meshes[1]->exchange({}, 0.05), Timeout, "exchange 1");
}

// Many peers and rounds: the exchange ends while leave() still goes through the sockets.
TEST(Mesh, leaving_ends_an_exchange_of_the_same_rank) {
  for (int round = 0; round < 20; ++round) {
    Lobby lobby(6);
    std::vector<std::shared_ptr<Mesh>> meshes(6);
    run_ranks(6, [&](int rank) { meshes[static_cast<std::size_t>(rank)] = lobby.connect(rank); });
    std::thread waiting([&] { EXPECT_THROW_WITH(meshes[0]->exchange({}, kPatience_s), Error, "rank 0 has left"); });
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    meshes[0]->leave();
    waiting.join();
    EXPECT_THROW_WITH(meshes[0]->exchange({}, kPatience_s), Error, "rank 0 has left");
  }
}

TEST(Mesh, a_rank_that_leaves_after_its_part_fails_nobody) {
  for (int i = 0; i < 20; ++i) {
    Lobby lobby(4);
    run_ranks(4, [&](int rank) {
      const auto mesh = lobby.connect(rank);
      EXPECT_EQ(mesh->exchange({bytes_of("last words"), {}}, kPatience_s).size(), std::size_t{4});
      mesh->leave();
    });
  }
}

TEST(Mesh, refuses_impossible_arguments) {
  Lobby lobby(2);
  const auto connect = [&lobby](int rank, int world_size, std::span<const std::string> addresses,
                                std::string_view token) {
    return Mesh::connect(rank, world_size, net::Listener(), addresses, token, 1.0);
  };
  EXPECT_THROW_WITH(connect(2, 2, lobby.addresses, ""), InvalidArgument, "rank 2");
  EXPECT_THROW_WITH(connect(-1, 2, lobby.addresses, ""), InvalidArgument, "rank -1");
  EXPECT_THROW_WITH(connect(0, 3, lobby.addresses, ""), InvalidArgument, "world_size 3");
  EXPECT_THROW_WITH(connect(0, 0, {}, ""), InvalidArgument, "world_size 0");
  EXPECT_THROW_WITH(connect(0, 2, lobby.addresses, std::string(257, 'x')), InvalidArgument, "257");
  EXPECT_THROW_WITH(connect(0, 2, lobby.addresses, ""), InvalidArgument, "listener");
  lobby.addresses[0] = "nonsense";
  EXPECT_THROW_WITH(lobby.connect(1), InvalidArgument, "nonsense");
}

TEST(Mesh, addresses_are_unlike) {
  const net::Listener a, b;
  EXPECT_NE(a.address(), b.address());
  EXPECT_EQ(a.address().size(), std::string("@zcomm-").size() + 32);
}

TEST(Mesh, works_between_processes) {
  constexpr int world_size = 4;
  Lobby lobby(world_size);
  std::vector<pid_t> children;
  for (int rank = 0; rank < world_size; ++rank) {
    const pid_t child = ::fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    int wrong = 1;
    try {
      const auto mesh = lobby.connect(rank);
      const auto parcels = mesh->exchange({bytes_of(message(rank, 1)), file_holding(rank)}, kPatience_s);
      wrong = 0;
      for (int other = 0; other < world_size; ++other) {
        const Parcel& parcel = parcels[static_cast<std::size_t>(other)];
        wrong += string_of(parcel.bytes) != message(other, 1) || number_in(parcel.fd) != other;
      }
      mesh->leave();
    } catch (const std::exception& error) {
      fail("rank", rank, error.what());
    }
    ::_exit(wrong);
  }
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
}
