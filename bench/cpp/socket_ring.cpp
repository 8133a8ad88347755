// Moving bytes over raw sockets (bench/cpp/socket_ring.hpp).
#include "socket_ring.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <system_error>
#include <thread>

namespace zcomm::bench {
namespace {

constexpr std::size_t kSegment = 1 << 20;
constexpr int kPatienceMs = 30'000;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

int tuned(int fd) {
  const int on = 1, room = 4 << 20;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
  ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof(room));
  return fd;
}

/// Remaining bytes of one socket.
struct Left {
  int fd;
  std::size_t out, in;
};

/// As much as the socket takes or has now; false: nothing went.
bool push(Left& left, const std::vector<std::byte>& from) {
  if (left.out == 0) return false;
  const ssize_t n = ::send(left.fd, from.data(), std::min(left.out, kSegment), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0 && errno != EAGAIN && errno != EINTR) fail("send");
  left.out -= n > 0 ? static_cast<std::size_t>(n) : 0;
  return n > 0;
}
bool pull(Left& left, std::vector<std::byte>& to) {
  if (left.in == 0) return false;
  const ssize_t n = ::recv(left.fd, to.data(), std::min(left.in, kSegment), MSG_DONTWAIT);
  if (n == 0) errno = ECONNRESET;
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) fail("recv");
  left.in -= n > 0 ? static_cast<std::size_t>(n) : 0;
  return n > 0;
}

/// Until all is done: works on whatever is ready, sleeps in poll when nothing is.
void serve(std::vector<Left> left, const std::vector<std::byte>& from, std::vector<std::byte>& to) {
  std::vector<pollfd> waiting;
  for (;;) {
    bool moved = false;
    for (Left& one : left) {
      moved |= pull(one, to);
      moved |= push(one, from);
    }
    if (moved) continue;
    waiting.clear();
    for (const Left& one : left) {
      const int events = (one.out ? POLLOUT : 0) | (one.in ? POLLIN : 0);
      if (events) waiting.push_back({one.fd, static_cast<short>(events), 0});
    }
    if (waiting.empty()) return;
    if (::poll(waiting.data(), waiting.size(), kPatienceMs) == 0) {
      errno = ETIMEDOUT;
      fail("poll");
    }
  }
}

}  // namespace

SocketRing::SocketRing() : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), out_(kSegment), in_(kSegment) {
  if (listener_ < 0) fail("socket");
  sockaddr_in address = loopback(0);
  socklen_t length = sizeof(address);
  if (::bind(tuned(listener_), reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(listener_, 64) != 0 ||
      ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    fail("listen");
  port_ = ntohs(address.sin_port);
}

SocketRing::~SocketRing() {
  for (const int fd : sockets_) ::close(fd);
  if (listener_ >= 0) ::close(listener_);
}

void SocketRing::connect(int rank, int world_size, int sockets, std::span<const int> ports) {
  const bool calls = world_size > 2 || rank == 0, answers = world_size > 2 || rank == 1;
  if (calls) {
    const sockaddr_in next = loopback(ports[static_cast<std::size_t>((rank + 1) % world_size)]);
    for (int i = 0; i < sockets; ++i) {
      sockets_.push_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (sockets_.back() < 0) fail("socket");
      if (::connect(tuned(sockets_.back()), reinterpret_cast<const sockaddr*>(&next), sizeof(next)) != 0)
        fail("connect");
    }
  }
  for (int i = 0; answers && i < sockets; ++i) {
    pollfd waiting{listener_, POLLIN, 0};
    if (::poll(&waiting, 1, kPatienceMs) <= 0) fail("accept");
    sockets_.push_back(::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    if (sockets_.back() < 0) fail("accept");
    tuned(sockets_.back());
  }
}

void SocketRing::run(std::size_t nbytes, int threads) {
  const std::size_t each = nbytes / sockets_.size() + 1;
  std::vector<Left> both, out, in;
  for (const int fd : sockets_) {
    both.push_back({fd, each, each});
    out.push_back({fd, each, 0});
    in.push_back({fd, 0, each});
  }
  if (threads == 1) return serve(std::move(both), out_, in_);
  std::exception_ptr error;
  std::thread sender([&] {
    try {
      serve(std::move(out), out_, in_);
    } catch (...) {
      error = std::current_exception();
    }
  });
  try {
    serve(std::move(in), out_, in_);
  } catch (...) {
    error = std::current_exception();
  }
  sender.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace zcomm::bench
