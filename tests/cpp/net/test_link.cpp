// Links: duplex without deadlock, ends and silence are errors that name the neighbour.
#include <sys/socket.h>

#include <numeric>

#include "net/link.hpp"
#include "net/world.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::test;

TEST(Link, both_send_more_than_the_socket_holds) {
  auto pair = net::make_link_pair(3, 8);
  EXPECT_EQ(pair.first->peer_rank(), 8);
  EXPECT_EQ(pair.second->peer_rank(), 3);
  constexpr std::size_t nbytes = 5'000'000;
  run_ranks(2, [&](int rank) {
    net::Link& link = rank == 0 ? *pair.first : *pair.second;
    const std::vector<std::byte> out(nbytes + static_cast<std::size_t>(rank), static_cast<std::byte>(rank + 1));
    std::vector<std::byte> in(nbytes + static_cast<std::size_t>(1 - rank));
    net::send_recv(link, out, link, in, kPatience_s);
    EXPECT_TRUE(in == std::vector<std::byte>(in.size(), static_cast<std::byte>(2 - rank)));
  });
}

TEST(Link, nothing_to_move_is_done_at_once) {
  auto pair = net::make_link_pair(0, 1);
  net::send_recv(*pair.first, {}, *pair.first, {}, 0.0);
}

TEST(Link, bytes_stay_in_order_over_many_pieces) {
  auto pair = net::make_link_pair(0, 1);
  run_ranks(2, [&](int rank) {
    for (std::size_t nbytes = 0; nbytes < 300; ++nbytes) {
      std::vector<std::byte> data(nbytes);
      for (std::size_t i = 0; i < nbytes; ++i) data[i] = static_cast<std::byte>(i + nbytes);
      std::vector<std::byte> in(nbytes);
      if (rank == 0) net::send_recv(*pair.first, data, *pair.first, {}, kPatience_s);
      if (rank == 1) net::send_recv(*pair.second, {}, *pair.second, in, kPatience_s);
      if (rank == 1) EXPECT_TRUE(in == data);
    }
  });
}

TEST(Link, silence_names_the_neighbour) {
  auto pair = net::make_link_pair(0, 6);
  std::vector<std::byte> some(100), many(50'000'000);
  EXPECT_THROW_WITH(net::send_recv(*pair.first, some, *pair.first, some, 0.05), Timeout,
                    "100 bytes are missing from rank 6");
  EXPECT_THROW_WITH(net::send_recv(*pair.first, many, *pair.first, {}, 0.05), Timeout, "not taken by rank 6");
}

TEST(Link, an_end_is_a_loss) {
  std::vector<std::byte> some(100);
  {
    auto pair = net::make_link_pair(0, 6);
    pair.second.reset();
    EXPECT_THROW_WITH(net::send_recv(*pair.first, {}, *pair.first, some, kPatience_s), PeerLost, "rank 6");
    EXPECT_THROW_WITH(net::send_recv(*pair.first, some, *pair.first, {}, kPatience_s), PeerLost, "rank 6");
  }
  auto pair = net::make_link_pair(0, 6);
  net::send_recv(*pair.second, std::span(some).first(60), *pair.second, {}, kPatience_s);
  pair.second.reset();  // in the middle of what is due
  EXPECT_THROW_WITH(net::send_recv(*pair.first, {}, *pair.first, some, kPatience_s), PeerLost, "rank 6");
}

TEST(Link, takes_a_blocking_socket) {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd other(ends[1]);
  const auto link = net::make_stream_link(UniqueFd(ends[0]), 4);
  std::byte byte;
  EXPECT_EQ(link->try_recv(std::span(&byte, 1)), std::size_t{0});
  EXPECT_THROW_WITH(net::make_stream_link(UniqueFd(), 4), SystemError, "rank 4");
}
