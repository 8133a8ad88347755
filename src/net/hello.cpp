// See hello.hpp.
#include "net/hello.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace zcomm::net {

namespace {

constexpr std::array<char, 8> kMagic = {'z', 'c', 'o', 'm', 'm', 'n', 'e', 't'};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kMostFds = 2;

}  // namespace

Hello Hello::make(HelloKind kind, int rank, int world_size, std::size_t fd_count, std::string_view token) {
  Hello hello{};
  hello.magic = kMagic;
  hello.version = kVersion;
  hello.kind = kind;
  hello.rank = rank;
  hello.world_size = world_size;
  hello.fd_count = static_cast<std::uint32_t>(fd_count);
  hello.token_nbytes = static_cast<std::uint32_t>(token.size());
  std::memcpy(hello.token.data(), token.data(), token.size());
  return hello;
}

bool Hello::matches(const Hello& expected) const {
  const bool token_matches = equal_in_constant_time(token, expected.token) & (token_nbytes == expected.token_nbytes);
  return magic == expected.magic && version == expected.version && kind == expected.kind &&
         world_size == expected.world_size && token_matches;
}

HelloReader::State HelloReader::advance(int socket) {
  static_assert(std::is_trivially_copyable_v<Hello> && sizeof(Hello) == 32 + kMaxTokenNbytes);
  while (nbytes_ < sizeof hello_) {
    const auto rest = std::as_writable_bytes(std::span(&hello_, 1)).subspan(nbytes_);
    const Moved moved = recv_some(socket, rest, &fds_);
    if (moved.ended || fds_.size() > kMostFds) return State::ended;
    if (moved.nbytes == 0) return State::waiting;
    nbytes_ += moved.nbytes;
  }
  return State::complete;
}

bool send_hello(int socket, const Hello& hello, std::span<const int> fds) {
  const Moved moved = send_some(socket, std::as_bytes(std::span(&hello, 1)), fds);
  return moved.nbytes == sizeof hello;
}

UniqueFd own_process() {
#ifdef SYS_pidfd_open
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));  // close-on-exec by default
#else
  return UniqueFd();
#endif
}

}  // namespace zcomm::net
