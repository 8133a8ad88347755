// See sockets.hpp.
#include "coll/tcp/sockets.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "base/notices.hpp"

namespace zcomm::coll {

using net::Cause;
using net::Fate;

namespace {

constexpr int kSlice_ms = 50;               // between checks for signals and losses
constexpr double kAnswer_s = 0.5;           // for a rank to report its operation
constexpr double kLife_s = 2.0;             // the same, if the job ends without an answer
constexpr double kCertainty_s = 1.0;        // for the mesh to find the cause after a peer's stream ended
constexpr std::size_t kReservedEvents = 2;  // failure, close

}  // namespace

TcpSockets::TcpSockets(std::shared_ptr<net::Mesh> mesh, std::vector<int> members, std::vector<PeerSockets> links,
                       TcpControl& post, const WaitTimes& times)
    : mesh_(std::move(mesh)),
      members_(std::move(members)),
      rank_(static_cast<int>(std::find(members_.begin(), members_.end(), mesh_->rank()) - members_.begin())),
      sockets_(std::move(links)),
      control_(post),
      clock_(times) {
  callback_ = mesh_->on_loss([this](net::Loss loss) {
    // A goodbye matters only to a rank that waits for the leaver, and that rank sees its stream end.
    if (loss.fate == Fate::died) fail({Cause::died, loss.rank, {}});
  });
  if (const auto loss = mesh_->lost(); loss && loss->fate == Fate::died) fail({Cause::died, loss->rank, {}});
}

TcpSockets::~TcpSockets() { mesh_->forget(callback_); }

void TcpSockets::begin(const Signature& signature) {
  current_ = signature;
  busy_ = entering_ = true;
  warned_of_.clear();
  restart_clock();
  if (closing_) throw Error(text("communicator was closed before ", describe(signature), " ran"));
  control_.failure().throw_if_set(during());
  control_.set_entered(signature);
}

std::string TcpSockets::during() const {
  return busy_ ? text(describe(current_), " (operation ", current_.sequence, ")") : std::string();
}

bool TcpSockets::advance(TcpTransfer& transfer, int index) {
  const std::span<iovec> rest = std::span(transfer.pieces).subspan(transfer.first);
  const int fd = socket(transfer.peer, index);
  const net::Moved moved = transfer.out ? net::send_pieces(fd, rest) : net::recv_pieces(fd, rest);
  if (moved.ended) throw_lost(transfer.peer);
  std::size_t nbytes = moved.nbytes;
  while (!transfer.done() && nbytes >= transfer.pieces[transfer.first].iov_len)
    nbytes -= transfer.pieces[transfer.first++].iov_len;
  if (nbytes > 0) {
    iovec& cut = transfer.pieces[transfer.first];
    cut.iov_base = static_cast<std::byte*>(cut.iov_base) + nbytes;
    cut.iov_len -= nbytes;
  }
  return moved.nbytes > 0;
}

void TcpSockets::move(std::span<TcpTransfer> transfers) {
  for (bool all = false; !all;) {
    all = true;
    bool moved = false;
    // Receive first: a peer that has done its part may have ended by the time we send.
    for (const bool out : {false, true}) {
      for (TcpTransfer& transfer : transfers) {
        if (transfer.out != out || transfer.done()) continue;
        moved |= advance(transfer, 0);
        all &= transfer.done();
      }
    }
    if (all) break;
    if (moved) continue;
    for (const TcpTransfer& transfer : transfers)
      if (!transfer.done()) expect(transfer.peer, 0, transfer.out ? POLLOUT : POLLIN);
    wait();
  }
}

void TcpSockets::expect(int peer, int index, short events) {
  fds_.resize(std::max(fds_.size(), kReservedEvents));
  fds_.push_back({socket(peer, index), events, 0});
  expected_.push_back(peer);
}

void TcpSockets::wait() {
  struct Forget {
    TcpSockets& sockets;
    ~Forget() { sockets.fds_.resize(kReservedEvents), sockets.expected_.clear(); }
  } const forget{*this};
  fds_[0] = {control_.failure().event(), POLLIN, 0};
  fds_[1] = {close_event_.get(), POLLIN, 0};
  for (;;) {
    const double left_s = std::chrono::duration<double>(clock_.next() - Clock::now()).count();
    net::wait_for(fds_, net::Deadline(left_s), kSlice_ms);
    const bool ready =
        std::any_of(fds_.begin() + kReservedEvents, fds_.end(), [](const pollfd& fd) { return fd.revents != 0; });
    if (ready) {
      if (!entering_ && !warned_of_.empty()) log_arrival();
      return;
    }
    look_around();
  }
}

void TcpSockets::look_around() {
  if (closing_) throw Error(text("communicator was closed while ", during(), " was running"));
  check_interrupt();
  control_.failure().throw_if_set(during());
  for (const int peer : expected_)
    if (mesh_->fate(name(peer)) == Fate::left) throw_lost(peer);
  if (Clock::now() < clock_.next()) return;
  if (control_.any_suspended()) return restart_clock();
  look_at_late();
}

void TcpSockets::look_at_late() {
  const bool is_over = clock_.is_over(Clock::now());
  const Late late = ask_late(!is_over, is_over && !clock_.is_exact() ? kLife_s : kAnswer_s);
  control_.failure().throw_if_set(during());
  if (control_.any_suspended()) return restart_clock();
  if (!is_over) {
    clock_.set_warned();
    if (!late.is_first) return;
    for (const int rank : late.ranks) warned_of_ += text(warned_of_.empty() ? "" : ", ", rank);
    return post_notice(complaint(late, " has waited "));
  }
  if (late.show_life && clock_.extend(Clock::now())) return;
  fail({Cause::late, late.ranks.empty() ? -1 : late.ranks.front(), complaint(late, " waited ")});
  control_.failure().throw_if_set(during());
}

TcpSockets::Late TcpSockets::ask_late(bool with_hosts, double patience_s) {
  const std::vector<std::optional<Signature>> answers = control_.ask_all(patience_s);
  std::sort(expected_.begin(), expected_.end());
  Late late;
  const auto add = [&](int mesh_rank, const std::string& last_operation) {
    late.ranks.push_back(mesh_rank);
    late.details += text("; rank ", mesh_rank, with_hosts ? control_.host_of(mesh_rank) : "", " ", last_operation);
  };
  // Not only the ranks that this rank waits for, because those may be waiting for others.
  for (int other = 0; other < control_.world_size(); ++other) {
    const auto& answer = answers[static_cast<std::size_t>(other)];
    if (!control_.has_link(other)) continue;
    if (!answer) {
      late.show_life = false;
      add(other, "does not answer (is its process stopped?)");
    } else if (answer->sequence == 0) {
      add(other, "has called nothing yet");
    } else if (static_cast<std::int32_t>(answer->sequence - current_.sequence) < 0) {
      add(other, text("last entered operation ", answer->sequence, ", ", describe(*answer)));
    } else if (other < name(rank_)) {
      late.is_first = false;
    }
  }
  if (late.ranks.empty()) {  // all are in it: names the ranks that this one waits for
    late.is_first = true;
    for (std::size_t i = 0; i < expected_.size(); ++i)
      if (i == 0 || expected_[i] != expected_[i - 1]) add(name(expected_[i]), "is in the same operation");
  }
  return late;
}

std::string TcpSockets::complaint(const Late& late, const char* waited) const {
  std::string ranks;
  for (const int rank : late.ranks) ranks += text(ranks.empty() ? "" : ", ", rank);
  return text(during(), ": rank ", name(rank_), waited, clock_.waited_s(Clock::now()), " s for rank ", ranks,
              entering_ ? " to enter it" : " to bring or take its data", late.details);
}

void TcpSockets::log_arrival() {
  post_notice(text(during(), ": rank ", std::exchange(warned_of_, {}), entering_ ? " came after " : " went on after ",
                   clock_.waited_s(Clock::now()), " s"));
}

/// A goodbye on the mesh may overtake data that the rank sent here before, for instance its reason for leaving.
bool TcpSockets::has_left(int name) const {
  if (control_.has_closed(name)) return true;
  return mesh_->fate(name) == Fate::left && control_.has_received_all(name);
}

void TcpSockets::throw_lost(int peer) {
  // The stream ended; other sockets show at about the same time whether its rank died or left.
  const net::Deadline certainty(kCertainty_s);
  std::vector<pollfd> failure{{control_.failure().event(), POLLIN, 0}};
  while (!certainty.passed()) {
    if (closing_) throw Error(text("communicator was closed while ", during(), " was running"));
    control_.failure().throw_if_set(during());
    if (has_left(name(peer))) break;
    net::wait_for(failure, certainty, 5);
  }
  fail({Cause::left, name(peer), {}});
  control_.failure().throw_if_set(during());
  throw PeerLost(name(peer), text("rank ", name(peer), " left"));
}

void TcpSockets::close() noexcept {
  closing_ = true;
  net::signal_event(close_event_);
}

}  // namespace zcomm::coll
