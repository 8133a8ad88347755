// StreamLink: Link over a connected non-blocking stream socket, and the duplex loop over two links.
//
// Thread rule: one thread at a time. Source: poll(2).
#include "net/link.hpp"

#include <fcntl.h>

#include "base/error.hpp"
#include "net/socket.hpp"

namespace zcomm::net {

namespace {

class StreamLink final : public Link {
 public:
  StreamLink(UniqueFd socket, int peer_rank) : socket_(std::move(socket)), peer_rank_(peer_rank) {}

  std::size_t try_send(std::span<const std::byte> bytes) override { return checked(send_some(socket_.get(), bytes)); }
  std::size_t try_recv(std::span<std::byte> bytes) override { return checked(recv_some(socket_.get(), bytes)); }
  int fd() const override { return socket_.get(); }
  int peer_rank() const override { return peer_rank_; }

 private:
  std::size_t checked(Moved moved) const {
    if (moved.ended) throw PeerLost(peer_rank_, text("rank ", peer_rank_, " died or left: its link ended"));
    return moved.nbytes;
  }

  UniqueFd socket_;
  int peer_rank_;
};

[[noreturn]] void throw_late(const Link& to, std::size_t unsent, const Link& from, std::size_t missing,
                             double timeout_s) {
  std::string what = text("a transfer was not complete within ", timeout_s, " s");
  if (missing > 0) what += text("; ", missing, " bytes are missing from rank ", from.peer_rank());
  if (unsent > 0) what += text("; ", unsent, " bytes were not taken by rank ", to.peer_rank());
  throw Timeout(what);
}

}  // namespace

std::unique_ptr<Link> make_stream_link(UniqueFd socket, int peer_rank) {
  const int flags = ::fcntl(socket.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    throw_system_error(errno,
                       text("the socket to rank ", peer_rank, " (descriptor ", socket.get(), ") cannot be used"));
  }
  return std::make_unique<StreamLink>(std::move(socket), peer_rank);
}

std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> make_link_pair(int rank_a, int rank_b) {
  auto [a, b] = make_socket_pair();
  return {make_stream_link(std::move(a), rank_b), make_stream_link(std::move(b), rank_a)};
}

void send_recv(Link& to, std::span<const std::byte> out, Link& from, std::span<std::byte> in, double timeout_s) {
  const Deadline deadline(timeout_s);
  std::vector<pollfd> fds;
  bool late = false;
  while (true) {
    // Receive first: a neighbour that has done its part may be gone by the time we send.
    if (!in.empty()) in = in.subspan(from.try_recv(in));
    if (!out.empty()) out = out.subspan(to.try_send(out));
    if (in.empty() && out.empty()) return;
    if (late) throw_late(to, out.size(), from, in.size(), timeout_s);
    fds.clear();
    if (!in.empty()) fds.push_back({from.fd(), POLLIN, 0});
    if (!out.empty()) fds.push_back({to.fd(), POLLOUT, 0});
    wait_for(fds, deadline);
    late = deadline.passed();
  }
}

}  // namespace zcomm::net
