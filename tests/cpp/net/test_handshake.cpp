// Admission: strangers, wrong tokens, impossible ranks and slow clients are not admitted, and delay no other.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "net/handshake.hpp"
#include "net/hello.hpp"
#include "net/socket.hpp"
#include "net/world.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::test;
using net::Hello;
using net::HelloKind;
using net::Mesh;

namespace {

UniqueFd call(const std::string& listener) {
  const net::Address address = net::parse_address(listener);
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.socket), address.nbytes), 0);
  return socket;
}

/// Connects, sends `hello` with copies of `fds`, and returns the socket.
UniqueFd call_and_say(const std::string& listener, const Hello& hello, std::span<const int> fds = {}) {
  UniqueFd socket = call(listener);
  EXPECT_TRUE(net::send_hello(socket.get(), hello, fds));
  return socket;
}

/// A world of 3 must form and work although `callers` connected first.
void expect_a_world_forms(Lobby& lobby) {
  std::vector<std::shared_ptr<Mesh>> meshes(3);
  run_ranks(3, [&](int rank) {
    auto& mesh = meshes[static_cast<std::size_t>(rank)];
    mesh = lobby.connect(rank);
    EXPECT_EQ(mesh->exchange({bytes_of("x"), {}}, kPatience_s).size(), std::size_t{3});
  });
}

bool was_dropped(const UniqueFd& socket) {
  char byte;
  return ::recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 0 || errno == ECONNRESET;
}

}  // namespace

TEST(Handshake, strangers_are_dropped_and_stop_nobody) {
  const int before = open_descriptors();
  {
    Lobby lobby(3);
    std::array<std::byte, 1000> noise;
    net::fill_random(noise);
    std::vector<UniqueFd> strangers;
    for (int i = 0; i < 3; ++i) {
      strangers.push_back(call(lobby.addresses[0]));  // sends nothing
      strangers.push_back(call(lobby.addresses[1]));
      EXPECT_EQ(::send(strangers.back().get(), noise.data(), 100, MSG_NOSIGNAL), 100);  // stops in the middle
      strangers.push_back(call(lobby.addresses[1]));
      EXPECT_EQ(::send(strangers.back().get(), noise.data(), noise.size(), MSG_NOSIGNAL), 1000);
      call(lobby.addresses[0]);  // hangs up at once
    }
    expect_a_world_forms(lobby);
    for (const UniqueFd& stranger : strangers) EXPECT_TRUE(was_dropped(stranger));
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Handshake, a_hello_must_be_exactly_what_is_due) {
  const int before = open_descriptors();
  {
    Lobby lobby(3);
    const std::array<int, 3> fds = {0, 1, 2};
    const auto hello = [](int rank) { return Hello::make(HelloKind::hello, rank, 3, 0, "secret"); };
    std::vector<Hello> wrong = {hello(0), hello(-1), hello(3), hello(1 << 30)};
    wrong.push_back(Hello::make(HelloKind::ack, 1, 3, 0, "secret"));
    wrong.push_back(Hello::make(HelloKind::hello, 1, 2, 0, "secret"));
    wrong.push_back(Hello::make(HelloKind::hello, 1, 3, 0, "secreT"));
    wrong.push_back(Hello::make(HelloKind::hello, 1, 3, 0, ""));
    wrong.push_back(Hello::make(HelloKind::hello, 1, 3, 0, std::string("secret") + '\0'));
    wrong.push_back(Hello::make(HelloKind::hello, 1, 3, 1, "secret"));  // announces a descriptor that is not there
    wrong.push_back(hello(1));
    wrong.back().magic[0] = 'Z';
    wrong.push_back(hello(1));
    wrong.back().version = 99;
    std::vector<UniqueFd> callers;
    for (const Hello& said : wrong) callers.push_back(call_and_say(lobby.addresses[0], said));
    callers.push_back(call_and_say(lobby.addresses[0], hello(1), fds));  // descriptors that were not announced
    expect_a_world_forms(lobby);
    for (const UniqueFd& caller : callers) EXPECT_TRUE(was_dropped(caller));
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Handshake, the_second_claim_to_a_rank_is_dropped) {
  Lobby lobby(2);
  const Hello hello = Hello::make(HelloKind::hello, 1, 2, 0, "secret");
  const UniqueFd first = call_and_say(lobby.addresses[0], hello);
  const UniqueFd second = call_and_say(lobby.addresses[0], hello);
  const auto mesh = lobby.connect(0);
  net::HelloReader reader;
  EXPECT_TRUE(reader.advance(first.get()) == net::HelloReader::State::complete);
  EXPECT_TRUE(reader.hello().matches(Hello::make(HelloKind::ack, 0, 2, 0, "secret")));
  EXPECT_TRUE(was_dropped(second));
}

TEST(Handshake, a_client_distrusts_a_listener_without_the_token) {
  // The stranger listens at rank 0's address, knows the form of an Ack, and lacks the token.
  net::Listener stranger, own;
  const std::vector<std::string> addresses = {stranger.address(), own.address()};
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    const int descriptor = 0;
    const std::array<int, 1> fds = {descriptor};
    while (!stop) {
      const UniqueFd guest(::accept4(stranger.fd(), nullptr, nullptr, SOCK_CLOEXEC));
      if (guest) net::send_hello(guest.get(), Hello::make(HelloKind::ack, 0, 2, 1, "guess"), fds);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  EXPECT_THROW_WITH(Mesh::connect(1, 2, std::move(own), addresses, "secret", 0.2), Timeout, "rank 0");
  stop = true;
  thread.join();
}

TEST(Handshake, a_wrong_token_is_explained) {
  Lobby lobby(2);
  run_ranks(2, [&](int rank) {
    if (rank == 0) EXPECT_THROW_WITH(lobby.connect(0, "secret", 0.4), Timeout, "rank 1");
    if (rank == 1) EXPECT_THROW_WITH(lobby.connect(1, "another", 0.3), Timeout, "token");
  });
}

TEST(Handshake, missing_ranks_are_named) {
  Lobby lobby(5);
  run_ranks(5, [&](int rank) {
    if (rank == 1 || rank == 3) return;  // they listen but never call or answer
    EXPECT_THROW_WITH(lobby.connect(rank, "secret", 0.3), Timeout, "ranks 1 and 3 within 0.3 s");
  });
}

TEST(Handshake, a_rank_that_is_gone_is_lost_long_before_the_deadline) {
  Lobby lobby(3);
  {
    const net::Listener gone = std::move(lobby.listeners[0]);
  }
  run_ranks(3, [&](int rank) {
    if (rank == 0) return;
    EXPECT_THROW_WITH(lobby.connect(rank), PeerLost, "ended before all ranks were connected");
  });
}
