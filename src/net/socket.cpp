// See socket.hpp.
#include "net/socket.hpp"

#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/fault.hpp"

namespace zcomm::net {

namespace {

constexpr std::size_t kMaxFds = 8;  // the kernel closes further ones in a message
constexpr std::size_t kMaxPieces = 64;
constexpr double kNever_s = 10.0 * 365 * 86400;

bool peer_is_gone(int error) {
  switch (error) {
    case EPIPE:
    case ECONNRESET:
    case ECONNABORTED:
    case ENOTCONN:
    case ETIMEDOUT:     // its host no longer answers
    case EHOSTUNREACH:  // no router on the way answers either
    case ENETUNREACH:
      return true;
    default:
      return false;
  }
}

}  // namespace

Deadline::Deadline(double timeout_s) {
  const double seconds = timeout_s > 0 ? std::min(timeout_s, kNever_s) : 0.0;  // NaN compares false
  at_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

int Deadline::poll_ms() const {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
  return static_cast<int>(std::clamp<decltype(left)>(left, 0, 60'000));
}

Moved send_some(int socket, std::span<const std::byte> bytes, std::span<const int> fds) {
  if (bytes.empty()) return {};
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
  if (!fds.empty()) {
    const std::size_t nbytes = sizeof(int) * fds.size();
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(nbytes);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(nbytes);
    std::memcpy(CMSG_DATA(header), fds.data(), nbytes);
  }
  ssize_t sent;
  do sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  while (sent < 0 && errno == EINTR);
  if (sent >= 0) return {static_cast<std::size_t>(sent), false};
  if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
  if (peer_is_gone(errno)) return {0, true};
  throw_system_error(errno, text("sending ", bytes.size(), " bytes and ", fds.size(), " descriptors to a peer"));
}

Moved recv_some(int socket, std::span<std::byte> bytes, std::vector<UniqueFd>* fds) {
  if (bytes.empty()) return {};
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)];
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t received;
  do received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  while (received < 0 && errno == EINTR);
  if (received < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
    if (peer_is_gone(errno)) return {0, true};
    throw_system_error(errno, "receiving from a peer");
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      UniqueFd owned(fd);
      if (fds != nullptr) fds->push_back(std::move(owned));
    }
  }
  return {static_cast<std::size_t>(received), received == 0};
}

Moved send_pieces(int socket, std::span<const iovec> pieces) {
  fault_point();
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = std::min(pieces.size(), kMaxPieces);
  ssize_t sent;
  do sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  while (sent < 0 && errno == EINTR);
  if (sent >= 0) return {static_cast<std::size_t>(sent), false};
  if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
  if (peer_is_gone(errno)) return {0, true};
  throw_system_error(errno, "sending to a peer");
}

Moved recv_pieces(int socket, std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = std::min(pieces.size(), kMaxPieces);
  ssize_t received;
  do received = ::recvmsg(socket, &message, MSG_DONTWAIT);
  while (received < 0 && errno == EINTR);
  if (received >= 0) return {static_cast<std::size_t>(received), received == 0};
  if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
  if (peer_is_gone(errno)) return {0, true};
  throw_system_error(errno, "receiving from a peer");
}

void wait_for(std::vector<pollfd>& fds, const Deadline& deadline, int at_most_ms) {
  if (::poll(fds.data(), fds.size(), std::min(deadline.poll_ms(), at_most_ms)) >= 0) return;
  if (errno != EINTR) throw_system_error(errno, text("poll of ", fds.size(), " descriptors"));
  for (pollfd& fd : fds) fd.revents = 0;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t nbytes = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) == 0 && peer.uid == ::geteuid();
}

void fill_random(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno != EINTR) throw_system_error(errno, "getrandom");
    if (got > 0) bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  std::byte difference{0};
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

std::pair<UniqueFd, UniqueFd> make_socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    throw_system_error(errno, "cannot make a pair of sockets");
  }
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

UniqueFd make_event() {
  UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) throw_system_error(errno, "cannot make an eventfd");
  return event;
}

void signal_event(const UniqueFd& event) noexcept {
  const std::uint64_t one = 1;
  // Fails only if 2^64 - 2 signals are pending, and then the event is signalled anyway.
  [[maybe_unused]] const ssize_t written = ::write(event.get(), &one, sizeof one);
}

void clear_event(const UniqueFd& event) noexcept {
  std::uint64_t count;
  [[maybe_unused]] const ssize_t got = ::read(event.get(), &count, sizeof count);
}

Address parse_address(const std::string& address) {
  Address result;
  if (address.size() < 2 || address[0] != '@' || address.size() > sizeof result.socket.sun_path) {
    throw InvalidArgument(text("'", address, "' is not the address of a listener"));
  }
  result.socket.sun_family = AF_UNIX;
  std::memcpy(result.socket.sun_path + 1, address.data() + 1, address.size() - 1);  // '@' stands for the zero byte
  result.nbytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size());
  return result;
}

std::string list_ranks(std::span<const int> ranks) {
  constexpr std::size_t limit = 16;
  std::string out;
  for (std::size_t i = 0; i < std::min(ranks.size(), limit); ++i) {
    if (i > 0) out += i + 1 == ranks.size() ? " and " : ", ";
    out += std::to_string(ranks[i]);
  }
  return ranks.size() > limit ? out + text(" and ", ranks.size() - limit, " more") : out;
}

}  // namespace zcomm::net
