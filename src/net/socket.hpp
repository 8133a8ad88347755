// Helpers for stream sockets (unix, TCP): deadlines, non-blocking messages with descriptors, peer credentials.
//
// Every send is MSG_NOSIGNAL, every received descriptor is close-on-exec and owned at once, no call blocks but
// wait_for. Thread rule: free functions without state. Source: unix(7), cmsg(3).
#pragma once

#include <poll.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.hpp"

namespace zcomm::net {

/// A point in time that waiting must not pass. Negative and NaN: now. Longer than ten years: never.
class Deadline {
 public:
  explicit Deadline(double timeout_s);
  bool passed() const { return Clock::now() >= at_; }
  /// For poll(): rounded up, at most a minute (callers loop).
  int poll_ms() const;

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point at_;
};

/// The result of one non-blocking call. nbytes 0 and not ended: it would have blocked.
struct Moved {
  std::size_t nbytes = 0;
  bool ended = false;  ///< the peer has ended
};

/// Sends as much as fits now; `fds` travel with the first byte.
Moved send_some(int socket, std::span<const std::byte> bytes, std::span<const int> fds = {});

/// Receives the available bytes; descriptors are appended to `fds`, or closed when it is null.
Moved recv_some(int socket, std::span<std::byte> bytes, std::vector<UniqueFd>* fds = nullptr);

/// The same for bytes that lie in pieces (the first 64 of them).
Moved send_pieces(int socket, std::span<const iovec> pieces);
Moved recv_pieces(int socket, std::span<const iovec> pieces);

/// poll() that survives signals (then nothing is ready) and never waits past `deadline` or `at_most_ms`.
void wait_for(std::vector<pollfd>& fds, const Deadline& deadline, int at_most_ms = 60'000);

/// Whether the process on the other side runs as our user.
bool same_user(int socket);

void fill_random(std::span<std::byte> bytes);

/// Compares in a time that depends only on the length.
bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b);

/// Two connected non-blocking stream sockets.
std::pair<UniqueFd, UniqueFd> make_socket_pair();

/// An eventfd that is not signalled.
UniqueFd make_event();
void signal_event(const UniqueFd& event) noexcept;
void clear_event(const UniqueFd& event) noexcept;

/// Abstract socket address of a Listener's text; throws InvalidArgument naming the text.
struct Address {
  sockaddr_un socket{};
  socklen_t nbytes = 0;
};
Address parse_address(const std::string& address);

/// "0, 2 and 5"; long lists end in "and N more".
std::string list_ranks(std::span<const int> ranks);

}  // namespace zcomm::net
