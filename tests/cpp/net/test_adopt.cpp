// A mesh over adopted sockets: parcels, deaths and goodbyes as over its own sockets, no descriptors; refusals.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "net/socket.hpp"
#include "net/tcp.hpp"
#include "net/world.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::test;
using net::AdoptedSockets;
using net::Mesh;

namespace {

std::pair<UniqueFd, UniqueFd> tcp_pair() {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t nbytes = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  UniqueFd a(::socket(AF_INET, SOCK_STREAM, 0));
  if (::bind(listener.get(), generic, nbytes) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), generic, &nbytes) != 0 || ::connect(a.get(), generic, nbytes) != 0)
    throw Error("no loopback connection");
  return {std::move(a), UniqueFd(::accept(listener.get(), nullptr, nullptr))};
}

std::vector<std::vector<AdoptedSockets>> sockets_of(int world_size) {
  const auto ranks = static_cast<std::size_t>(world_size);
  std::vector<std::vector<AdoptedSockets>> all(ranks);
  for (auto& own : all) own.resize(ranks);
  for (std::size_t a = 0; a < ranks; ++a) {
    for (std::size_t b = a + 1; b < ranks; ++b) {
      std::tie(all[a][b].data, all[b][a].data) = tcp_pair();
      std::tie(all[a][b].control, all[b][a].control) = tcp_pair();
    }
  }
  return all;
}

int option(int socket, int level, int name) {
  int value = -1;
  socklen_t nbytes = sizeof value;
  ::getsockopt(socket, level, name, &value, &nbytes);
  return value;
}

}  // namespace

TEST(Adopt, parcels_travel_but_descriptors_do_not) {
  auto sockets = sockets_of(4);
  run_ranks(4, [&](int rank) {
    const auto mesh = Mesh::adopt(rank, std::move(sockets[static_cast<std::size_t>(rank)]));
    EXPECT_THROW_WITH(mesh->exchange({bytes_of("x"), net::make_event()}, kPatience_s), Unsupported, "between hosts");
    for (const std::size_t length : {0, 5, 300'000}) {
      const std::string message(length, static_cast<char>('a' + rank));
      const auto parcels = mesh->exchange({bytes_of(message), {}}, kPatience_s);
      for (int r = 0; r < 4; ++r)
        EXPECT_TRUE(string_of(parcels[static_cast<std::size_t>(r)].bytes) ==
                    std::string(length, static_cast<char>('a' + r)));
    }
    mesh->exchange({}, kPatience_s);
  });
}

TEST(Adopt, deaths_and_goodbyes_are_told_apart) {
  auto sockets = sockets_of(3);
  std::vector<std::shared_ptr<Mesh>> meshes;
  for (int rank = 0; rank < 3; ++rank)
    meshes.push_back(Mesh::adopt(rank, std::move(sockets[static_cast<std::size_t>(rank)])));
  std::atomic<int> told{0};
  meshes[0]->on_loss([&](net::Loss) { ++told; });
  meshes[1]->leave();
  meshes[2]->drop_dead();
  EXPECT_TRUE(eventually([&] { return told == 2; }));
  EXPECT_TRUE(meshes[0]->fate(1) == net::Fate::left);
  EXPECT_TRUE(meshes[0]->fate(2) == net::Fate::died);
  EXPECT_THROW(meshes[0]->exchange({}, kPatience_s), PeerLost);
}

TEST(Adopt, only_control_sockets_time_out_with_their_host) {
  auto sockets = sockets_of(2);
  const int data = sockets[0][1].data.get(), control = sockets[0][1].control.get();
  const auto mesh = Mesh::adopt(0, std::move(sockets[0]));
  EXPECT_EQ(option(data, IPPROTO_TCP, TCP_NODELAY), 1);
  EXPECT_EQ(option(control, SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(option(control, IPPROTO_TCP, TCP_USER_TIMEOUT), net::kHostDeath_s * 1000);
  EXPECT_EQ(option(data, IPPROTO_TCP, TCP_USER_TIMEOUT), 0);
}

TEST(Adopt, bad_sockets_are_refused) {
  EXPECT_THROW_WITH(Mesh::adopt(2, std::vector<AdoptedSockets>(2)), InvalidArgument, "rank 2");
  EXPECT_THROW_WITH(Mesh::adopt(0, std::vector<AdoptedSockets>(2)), InvalidArgument, "not both");
  auto sockets = sockets_of(2);
  EXPECT_THROW_WITH(Mesh::adopt(1, std::move(sockets[0])), InvalidArgument, "to rank 0");
  EXPECT_EQ(Mesh::adopt(0, std::vector<AdoptedSockets>(1))->exchange({}, 1).size(), std::size_t{1});
}
