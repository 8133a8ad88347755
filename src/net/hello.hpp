// Hello and Ack: the one fixed-size message that each side of a new connection sends ([Note: handshake]).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/unique_fd.hpp"
#include "net/handshake.hpp"
#include "net/socket.hpp"

namespace zcomm::net {

enum class HelloKind : std::uint32_t { hello = 1, ack = 2 };

/// Sent as it is in memory, because both ends run on one host.
struct Hello {
  std::array<char, 8> magic;
  std::uint32_t version;
  HelloKind kind;
  std::int32_t rank;
  std::int32_t world_size;
  std::uint32_t fd_count;
  std::uint32_t token_nbytes;
  std::array<std::byte, kMaxTokenNbytes> token;

  static Hello make(HelloKind kind, int rank, int world_size, std::size_t fd_count, std::string_view token);
  /// Whether everything but rank and fd_count equals `expected`; the token in constant time.
  bool matches(const Hello& expected) const;
};

/// A Hello that arrives in pieces, with its descriptors. Reads no byte beyond it.
class HelloReader {
 public:
  enum class State { waiting, complete, ended };
  State advance(int socket);
  const Hello& hello() const { return hello_; }
  std::vector<UniqueFd>& fds() { return fds_; }

 private:
  Hello hello_{};
  std::size_t nbytes_ = 0;
  std::vector<UniqueFd> fds_;
};

/// Sends the whole message with `fds`; false: the peer ended or does not read (a fresh socket always has the room).
bool send_hello(int socket, const Hello& hello, std::span<const int> fds);

/// A pidfd of this process, empty if the kernel or a sandbox refuses it.
UniqueFd own_process();

}  // namespace zcomm::net
