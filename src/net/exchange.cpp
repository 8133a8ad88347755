// See exchange.hpp.
#include "net/exchange.hpp"

#include <sys/socket.h>

#include <cstring>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "net/monitor.hpp"
#include "net/socket.hpp"

namespace zcomm::net {

namespace {

constexpr std::uint64_t kMaxParcelNbytes = std::uint64_t{1} << 30;

struct FrameHeader {
  std::uint64_t sequence;
  std::uint64_t nbytes;
  std::uint64_t fd_count;
};

/// The frame that goes to all peers.
struct Frame {
  Frame(std::uint64_t sequence, const Parcel& parcel) : bytes(sizeof(FrameHeader) + parcel.bytes.size()) {
    const FrameHeader header{sequence, parcel.bytes.size(), parcel.fd ? 1u : 0u};
    std::memcpy(bytes.data(), &header, sizeof header);
    if (!parcel.bytes.empty()) std::memcpy(bytes.data() + sizeof header, parcel.bytes.data(), parcel.bytes.size());
    if (parcel.fd) fds.push_back(parcel.fd.get());
  }
  std::vector<std::byte> bytes;
  std::vector<int> fds;
};

/// One peer's half of an exchange: the bytes still to be sent and received.
class Dialogue {
 public:
  Dialogue(int peer, int socket) : peer_(peer), socket_(socket) {}

  int peer() const { return peer_; }
  bool sent(const Frame& frame) const { return sent_nbytes_ == frame.bytes.size(); }
  bool received() const { return header_nbytes_ == sizeof header_ && body_nbytes_ == parcel_.bytes.size(); }
  bool done(const Frame& frame) const { return sent(frame) && received(); }
  pollfd interest(const Frame& frame) const {
    if (done(frame)) return {-1, 0, 0};
    return {socket_, static_cast<short>((received() ? 0 : POLLIN) | (sent(frame) ? 0 : POLLOUT)), 0};
  }
  Parcel take() { return std::move(parcel_); }

  /// Moves as much as possible now; false: the peer ended before the dialogue was done.
  bool advance(const Frame& frame) {
    // Receive first: a peer that has sent all and left need only receive our part.
    return receive(frame) && send(frame);
  }

 private:
  bool send(const Frame& frame) {
    while (!sent(frame)) {
      const auto rest = std::span(frame.bytes).subspan(sent_nbytes_);
      const Moved moved =
          send_some(socket_, rest, sent_nbytes_ == 0 ? std::span<const int>(frame.fds) : std::span<const int>());
      if (moved.ended) return false;
      if (moved.nbytes == 0) return true;
      sent_nbytes_ += moved.nbytes;
    }
    return true;
  }

  bool receive(const Frame& frame) {
    while (!received()) {
      const bool in_header = header_nbytes_ < sizeof header_;
      const auto rest = in_header ? std::as_writable_bytes(std::span(&header_, 1)).subspan(header_nbytes_)
                                  : std::span(parcel_.bytes).subspan(body_nbytes_);
      const Moved moved = recv_some(socket_, rest, &fds_);
      if (moved.ended) return false;
      if (moved.nbytes == 0) return true;
      (in_header ? header_nbytes_ : body_nbytes_) += moved.nbytes;
      if (in_header && header_nbytes_ == sizeof header_) begin_body(frame);
    }
    return true;
  }

  void begin_body(const Frame& frame) {
    FrameHeader own;
    std::memcpy(&own, frame.bytes.data(), sizeof own);
    if (header_.sequence != own.sequence) {
      throw CollectiveMismatch(
          text("exchange ", own.sequence, " of this rank met exchange ", header_.sequence, " of rank ", peer_));
    }
    if (header_.nbytes > kMaxParcelNbytes) {
      throw Error(text("rank ", peer_, " announces a parcel of ", header_.nbytes, " bytes; at most ", kMaxParcelNbytes,
                       " may travel"));
    }
    if (header_.fd_count > 0 && fds_.empty()) {
      throw_system_error(EMFILE,
                         text("the descriptor that rank ", peer_, " sent could not be received (limit of open files)"));
    }
    if (header_.fd_count > 0) parcel_.fd = std::move(fds_.front());
    fds_.clear();
    parcel_.bytes.resize(header_.nbytes);
  }

  int peer_;
  int socket_;
  std::size_t sent_nbytes_ = 0;
  FrameHeader header_{};
  std::size_t header_nbytes_ = 0;
  std::size_t body_nbytes_ = 0;
  Parcel parcel_;
  std::vector<UniqueFd> fds_;
};

[[noreturn]] void throw_lost(int peer, std::uint64_t sequence, const Monitor& monitor) {
  const char* const how = monitor.fate(peer) == Fate::left ? "left" : "died or left";
  throw PeerLost(peer, text("rank ", peer, " ", how, " during exchange ", sequence));
}

[[noreturn]] void throw_late(const std::vector<Dialogue>& dialogues, const Frame& frame, std::uint64_t sequence,
                             double timeout_s) {
  std::vector<int> silent, deaf;
  for (const Dialogue& dialogue : dialogues) {
    if (!dialogue.received()) silent.push_back(dialogue.peer());
    if (dialogue.received() && !dialogue.sent(frame)) deaf.push_back(dialogue.peer());
  }
  std::string what = text("exchange ", sequence, " was not complete within ", timeout_s, " s");
  if (!silent.empty())
    what += text("; nothing (or not all) came from rank", silent.size() > 1 ? "s " : " ", list_ranks(silent));
  if (!deaf.empty()) what += text("; not all was taken by rank", deaf.size() > 1 ? "s " : " ", list_ranks(deaf));
  throw Timeout(what);
}

}  // namespace

Exchange::Exchange(int rank, std::vector<UniqueFd> sockets) : rank_(rank), sockets_(std::move(sockets)) {}

void Exchange::abort() noexcept {
  for (const UniqueFd& socket : sockets_) {
    if (socket) ::shutdown(socket.get(), SHUT_RDWR);
  }
}

std::vector<Parcel> Exchange::run(Parcel mine, double timeout_s, const Monitor& monitor) {
  if (!failure_.empty()) throw Error(text("no exchange is possible after one that failed: ", failure_));
  if (mine.bytes.size() > kMaxParcelNbytes) {
    throw InvalidArgument(text("a parcel of ", mine.bytes.size(), " bytes; at most ", kMaxParcelNbytes, " may travel"));
  }
  try {
    return run_checked(std::move(mine), timeout_s, monitor);
  } catch (const std::exception& error) {
    failure_ = error.what();
    throw;
  }
}

std::vector<Parcel> Exchange::run_checked(Parcel mine, double timeout_s, const Monitor& monitor) {
  const std::uint64_t sequence = sequence_++;
  const Deadline deadline(timeout_s);
  const Frame frame(sequence, mine);
  std::vector<Dialogue> dialogues;
  for (std::size_t peer = 0; peer < sockets_.size(); ++peer) {
    if (sockets_[peer]) dialogues.emplace_back(static_cast<int>(peer), sockets_[peer].get());
  }
  bool late = false;
  while (true) {
    clear_event(monitor.loss_event());
    bool done = true;
    std::vector<pollfd> fds{{monitor.loss_event().get(), POLLIN, 0}};
    for (Dialogue& dialogue : dialogues) {
      // Checked before the sockets, because all data that a lost peer sent has arrived by then.
      const bool lost = monitor.fate(dialogue.peer()) != Fate::alive;
      const bool present = dialogue.done(frame) || dialogue.advance(frame);
      if (!dialogue.done(frame) && (lost || !present)) throw_lost(dialogue.peer(), sequence, monitor);
      done &= dialogue.done(frame);
      fds.push_back(dialogue.interest(frame));
    }
    if (done) break;
    if (late) throw_late(dialogues, frame, sequence, timeout_s);
    wait_for(fds, deadline, 1000);
    check_interrupt();
    late = deadline.passed();
  }
  std::vector<Parcel> parcels(sockets_.size());
  for (Dialogue& dialogue : dialogues) parcels[static_cast<std::size_t>(dialogue.peer())] = dialogue.take();
  parcels[static_cast<std::size_t>(rank_)] = std::move(mine);
  return parcels;
}

}  // namespace zcomm::net
