// See tcp.hpp.
#include "net/tcp.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "base/error.hpp"

namespace zcomm::net {

namespace {

constexpr int kProbes = 5;

bool is_tcp(int socket) {
  int domain = 0, type = 0;
  socklen_t nbytes = sizeof domain;
  if (::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &nbytes) != 0) return false;
  nbytes = sizeof type;
  if (::getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &nbytes) != 0) return false;
  return (domain == AF_INET || domain == AF_INET6) && type == SOCK_STREAM;
}

void set(int socket, int level, int option, int value, const char* name, int peer_rank) {
  if (::setsockopt(socket, level, option, &value, sizeof value) == 0) return;
  throw_system_error(errno, text("cannot set ", name, "=", value, " on the socket to rank ", peer_rank));
}

}  // namespace

void make_prompt(int socket, int peer_rank) {
  const int flags = ::fcntl(socket, F_GETFD);
  if (flags < 0 || ::fcntl(socket, F_SETFD, flags | FD_CLOEXEC) != 0)
    throw_system_error(errno, text("the socket to rank ", peer_rank, " (descriptor ", socket, ") cannot be used"));
  if (is_tcp(socket)) set(socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY", peer_rank);
}

void notice_dead_host(int socket, int peer_rank) {
  if (!is_tcp(socket)) return;
  const int interval_s = kHostDeath_s / kProbes;
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE", peer_rank);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, interval_s, "TCP_KEEPIDLE", peer_rank);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval_s, "TCP_KEEPINTVL", peer_rank);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes - 1, "TCP_KEEPCNT", peer_rank);
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kHostDeath_s * 1000, "TCP_USER_TIMEOUT", peer_rank);
}

std::string peer_address(int socket) {
  sockaddr_storage address{};
  socklen_t nbytes = sizeof address;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &nbytes) != 0) return {};
  char host[NI_MAXHOST] = {};
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return {};
  const int failed =
      ::getnameinfo(reinterpret_cast<sockaddr*>(&address), nbytes, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return failed == 0 ? std::string(host) : std::string();
}

}  // namespace zcomm::net
