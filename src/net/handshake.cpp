// See handshake.hpp.
#include "net/handshake.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <list>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "net/hello.hpp"
#include "net/socket.hpp"

namespace zcomm::net {

namespace {

constexpr double kHelloTimeout_s = 2.0;      // for one accepted connection to send its Hello
constexpr double kRetry_s = 0.02;            // before a dropped client or a full queue is retried
constexpr double kGrace_s = 0.5;             // after a rank's end: ranks that time out together all throw Timeout
constexpr std::size_t kMostStrangers = 256;  // accepted connections that have not sent anything

class Handshake {
 public:
  Handshake(int rank, const Listener& listener, std::span<const std::string> addresses, std::string_view token,
            double timeout_s)
      : rank_(rank),
        world_size_(static_cast<int>(addresses.size())),
        listener_(listener),
        token_(token),
        timeout_s_(timeout_s),
        deadline_(timeout_s),
        process_(own_process()),
        channels_(addresses.size()) {
    for (int peer = 0; peer < rank; ++peer) calls_.push_back(Call(peer, parse_address(addresses[peer])));
  }

  std::vector<Channel> run() {
    while (true) {
      for (Call& call : calls_) {
        if (!call.socket && call.next_try.passed()) dial(call);
      }
      if (missing().empty()) return std::move(channels_);
      if (deadline_.passed()) throw Timeout(describe_missing());
      if (ended_ && grace_.passed()) {
        throw PeerLost(*ended_, text("rank ", *ended_,
                                     " ended before all ranks were connected, or runs in another network "
                                     "namespace; ",
                                     describe_missing()));
      }
      wait_and_serve();
    }
  }

 private:
  /// Our connection to a lower rank, until its Ack is received.
  struct Call {
    Call(int to, Address where) : peer(to), address(where), next_try(0) {}
    int peer;
    Address address;
    Deadline next_try;
    UniqueFd socket{};
    HelloReader reader{};
    bool was_dropped = false;
  };
  /// An accepted connection that has not sent its Hello.
  struct Guest {
    explicit Guest(UniqueFd accepted) : socket(std::move(accepted)) {}
    UniqueFd socket;
    HelloReader reader{};
    Deadline deadline{kHelloTimeout_s};
  };

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer != rank_ && !channels_[peer].data) ranks.push_back(peer);
    }
    return ranks;
  }

  std::string describe_missing() const {
    const std::vector<int> ranks = missing();
    std::string what = text("rank ", rank_, " of ", world_size_, " had no connection with rank",
                            ranks.size() > 1 ? "s " : " ", list_ranks(ranks));
    if (deadline_.passed()) what += text(" within ", timeout_s_, " s");
    for (const Call& call : calls_) {
      if (!call.was_dropped) continue;
      return what +
             text("; rank ", call.peer, " closed our connection: does it belong to the same job (token, world size)?");
    }
    return what;
  }

  void hang_up(Call& call) {
    call.socket.reset();
    call.reader = HelloReader();
    call.next_try = Deadline(kRetry_s);
  }

  void dial(Call& call) {
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) throw_system_error(errno, text("cannot make a socket to rank ", call.peer));
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&call.address.socket), call.address.nbytes) != 0) {
      if (errno == EAGAIN || errno == EINTR) return hang_up(call);  // its queue is full
      if (errno == ECONNREFUSED) {
        set_ended(call.peer);  // names are random and bound before they are sent: this peer will not come back
        return hang_up(call);
      }
      throw_system_error(errno, text("cannot connect to rank ", call.peer));
    }
    if (!same_user(socket.get())) throw Error(text("the address of rank ", call.peer, " belongs to another user"));
    const int process = process_.get();
    const std::span<const int> fds(&process, process_ ? 1 : 0);
    const Hello hello = Hello::make(HelloKind::hello, rank_, world_size_, fds.size(), token_);
    if (!send_hello(socket.get(), hello, fds)) return hang_up(call);
    call.socket = std::move(socket);
  }

  /// Reads the Ack if it has arrived.
  void answer(Call& call) {
    const HelloReader::State state = call.reader.advance(call.socket.get());
    if (state == HelloReader::State::waiting) return;
    const Hello& ack = call.reader.hello();
    std::vector<UniqueFd>& fds = call.reader.fds();
    const Hello expected = Hello::make(HelloKind::ack, call.peer, world_size_, 0, token_);
    if (state == HelloReader::State::ended || !ack.matches(expected) || ack.rank != call.peer ||
        fds.size() != ack.fd_count || fds.empty()) {
      call.was_dropped = true;
      return hang_up(call);
    }
    Channel& channel = channels_[call.peer];
    channel.control = std::move(fds[0]);
    if (fds.size() > 1) channel.process = std::move(fds[1]);
    channel.data = std::move(call.socket);
    call.next_try = Deadline(1e18);
  }

  void accept_guests() {
    while (true) {
      UniqueFd socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        throw_system_error(errno, text("rank ", rank_, " cannot accept a connection"));
      }
      if (!same_user(socket.get())) continue;
      if (guests_.size() == kMostStrangers) guests_.pop_front();
      guests_.emplace_back(std::move(socket));
    }
  }

  /// Whether the guest has been accepted or dropped.
  bool greet(Guest& guest) {
    const HelloReader::State state = guest.reader.advance(guest.socket.get());
    if (state == HelloReader::State::waiting) return guest.deadline.passed();
    const Hello& hello = guest.reader.hello();
    std::vector<UniqueFd>& fds = guest.reader.fds();
    const Hello expected = Hello::make(HelloKind::hello, rank_, world_size_, 0, token_);
    if (state == HelloReader::State::ended || !hello.matches(expected)) return true;
    if (hello.rank <= rank_ || hello.rank >= world_size_ || channels_[hello.rank].data) return true;
    if (fds.size() != hello.fd_count || fds.size() > 1) return true;

    auto [ours, theirs] = make_socket_pair();
    const int sent[] = {theirs.get(), process_.get()};
    const std::span<const int> acked(sent, process_ ? 2 : 1);
    const Hello ack = Hello::make(HelloKind::ack, rank_, world_size_, acked.size(), token_);
    if (!send_hello(guest.socket.get(), ack, acked)) return true;
    Channel& channel = channels_[hello.rank];
    channel.data = std::move(guest.socket);
    channel.control = std::move(ours);
    if (!fds.empty()) channel.process = std::move(fds[0]);
    return true;
  }

  void set_ended(int peer) {
    if (ended_) return;
    ended_ = peer;
    grace_ = Deadline(kGrace_s);
  }

  /// Whether `peer` is connected, alive and has sent nothing.
  bool is_quiet(int peer) {
    if (!channels_[peer].control) return false;
    char byte;
    const ssize_t got = ::recv(channels_[peer].control.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    const bool quiet = got < 0 && errno != ECONNRESET;
    if (!quiet && got <= 0) set_ended(peer);
    return quiet;
  }

  void wait_and_serve() {
    std::vector<pollfd> fds{{listener_.fd(), POLLIN, 0}};
    for (const Call& call : calls_) {
      if (call.socket) fds.push_back({call.socket.get(), POLLIN, 0});
    }
    for (const Guest& guest : guests_) fds.push_back({guest.socket.get(), POLLIN, 0});
    for (int peer = 0; peer < world_size_; ++peer) {
      if (is_quiet(peer)) fds.push_back({channels_[peer].control.get(), POLLIN, 0});  // a goodbye is not ours to read
    }
    const bool soon = ended_ || !guests_.empty() || std::any_of(calls_.begin(), calls_.end(), [this](const Call& call) {
                        return !call.socket && !channels_[call.peer].data;
                      });
    wait_for(fds, deadline_, soon ? static_cast<int>(kRetry_s * 1000) : 1000);
    check_interrupt();
    accept_guests();
    guests_.remove_if([this](Guest& guest) { return greet(guest); });
    for (Call& call : calls_) {
      if (call.socket) answer(call);
    }
  }

  const int rank_;
  const int world_size_;
  const Listener& listener_;
  const std::string_view token_;
  const double timeout_s_;
  const Deadline deadline_;
  const UniqueFd process_;
  std::vector<Channel> channels_;  // by rank
  std::list<Call> calls_;
  std::list<Guest> guests_;
  std::optional<int> ended_;  // the first rank that was found to have ended
  Deadline grace_{0};
};

}  // namespace

std::vector<Channel> connect_all(int rank, const Listener& listener, std::span<const std::string> addresses,
                                 std::string_view token, double timeout_s) {
  return Handshake(rank, listener, addresses, token, timeout_s).run();
}

}  // namespace zcomm::net
