// See control.hpp.
#include "coll/tcp/control.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "net/tcp.hpp"

namespace zcomm::coll {
namespace {

constexpr auto kFarewell = std::chrono::seconds(1);
constexpr std::size_t kMaxMessageNbytes = 8192;

struct PoisonHead {
  net::Cause cause;
  std::int32_t rank;
};

std::vector<std::byte> encode(const FailureReport& report) {
  const PoisonHead head{report.cause, report.rank};
  const std::size_t length = std::min(report.message.size(), kMaxMessageNbytes);
  std::vector<std::byte> bytes(sizeof head + length);
  std::memcpy(bytes.data(), &head, sizeof head);
  std::memcpy(bytes.data() + sizeof head, report.message.data(), length);
  return bytes;
}

FailureReport decode(std::span<const std::byte> bytes) {
  PoisonHead head;
  if (bytes.size() < sizeof head) throw Error("a failure report that is cut short");
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.cause == net::Cause::none || head.cause > net::Cause::mismatch)
    throw Error("a failure report that makes no sense");
  return {head.cause, head.rank,
          std::string(reinterpret_cast<const char*>(bytes.data()) + sizeof head, bytes.size() - sizeof head)};
}

/// Skips the first `skip` bytes.
void append(std::vector<iovec>& to, void* data, std::size_t nbytes, std::size_t& skip) {
  const std::size_t cut = std::min(skip, nbytes);
  skip -= cut;
  if (nbytes > cut) to.push_back({static_cast<std::byte*>(data) + cut, nbytes - cut});
}

}  // namespace

TcpControl::TcpControl(int rank, std::vector<UniqueFd> sockets, TcpFailure& failure)
    : rank_(rank), failure_(failure), peers_(sockets.size()), waste_(64 << 10), answers_(sockets.size()) {
  for (std::size_t r = 0; r < sockets.size(); ++r) {
    peers_[r].socket = std::move(sockets[r]);
    peers_[r].gone = !peers_[r].socket;
  }
}

void TcpControl::start(Handler& handler) {
  handler_ = &handler;
  if (world_size() > 1) thread_ = std::thread([this] { loop(); });
}

void TcpControl::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!closing_) {
      if (failure_.is_set() && !failure_broadcast_) broadcast_failure();
      for (int peer = 0; peer < world_size(); ++peer) enqueue(peer, {.kind = FrameKind::bye});
      close_by_ = Clock::now() + kFarewell;
    }
    closing_ = true;
    wake();
  }
  if (thread_.joinable()) thread_.join();
}

void TcpControl::enqueue(int peer, Frame head, std::vector<std::byte> owned) {
  Peer& to = peers_[static_cast<std::size_t>(peer)];
  if (to.gone) return;
  head.nbytes = owned.size();
  to.urgent.push_back({head, std::move(owned), {}, 0});
  pump_out(peer);  // it usually fits
  if (!to.urgent.empty()) wake();
}

void TcpControl::enqueue_bulk(int peer, Frame head, std::vector<iovec> pieces, std::uint64_t key) {
  Peer& to = peers_[static_cast<std::size_t>(peer)];
  if (to.gone) return;
  head.nbytes = 0;
  for (const iovec& piece : pieces) head.nbytes += piece.iov_len;
  to.bulk.push_back({head, {}, std::move(pieces), key});
  wake();
}

void TcpControl::discard_incoming(int peer, std::uint64_t id) {
  Peer& from = peers_[static_cast<std::size_t>(peer)];
  if (from.body && from.head.id == id) from.target.clear();
}

void TcpControl::withdraw(int index, std::uint64_t key) {
  Peer& peer = peers_[static_cast<std::size_t>(index)];
  for (auto frame = peer.bulk.begin(); frame != peer.bulk.end();) {
    if (frame->key != key) {
      ++frame;
    } else if (frame == peer.bulk.begin() && peer.sending == &peer.bulk) {  // a partly sent frame must be completed
      for (const iovec& piece : std::exchange(frame->pieces, {})) {
        const auto* bytes = static_cast<const std::byte*>(piece.iov_base);
        frame->owned.insert(frame->owned.end(), bytes, bytes + piece.iov_len);
      }
      frame->key = 0;
      ++frame;
    } else {
      frame = peer.bulk.erase(frame);
    }
  }
}

void TcpControl::loop() noexcept {
  std::unique_lock lock(mutex_);
  while (wait(lock)) {
    for (int peer = 0; peer < world_size(); ++peer) {
      const bool broken = peers_[static_cast<std::size_t>(peer)].broken;
      if (fds_[static_cast<std::size_t>(peer) + 2].revents == 0 && !broken) continue;
      try {
        pump_in(peer);
        pump_out(peer);
        if (broken) lose(peer);
      } catch (const std::exception& error) {
        lose(peer);
        if (failure_.set({net::Cause::failed, rank_,
                          text("rank ", peer, " sent bytes that are not a valid frame: ", error.what())}))
          wake();
      }
    }
    if (failure_.is_set() && !failure_broadcast_) broadcast_failure();
  }
}

/// Polls without the lock; false at the end.
bool TcpControl::wait(std::unique_lock<std::mutex>& lock) {
  const auto now = Clock::now();
  auto until = handler_->expire(now);
  if (closing_) {
    if (all_sent() || now >= close_by_) return false;
    until = close_by_;
  }
  fds_.assign({{event_.get(), POLLIN, 0}, {failure_broadcast_ ? -1 : failure_.event(), POLLIN, 0}});
  for (const Peer& peer : peers_) {
    const bool writes = !peer.urgent.empty() || !peer.bulk.empty();
    fds_.push_back({peer.gone ? -1 : peer.socket.get(), static_cast<short>(POLLIN | (writes ? POLLOUT : 0)), 0});
  }
  lock.unlock();
  const double seconds = std::chrono::duration<double>(until - now).count();
  net::wait_for(fds_, net::Deadline(seconds));
  lock.lock();
  net::clear_event(event_);
  return true;
}

bool TcpControl::all_sent() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.gone || peer.broken || peer.urgent.empty(); });
}

void TcpControl::pump_out(int index) {
  Peer& peer = peers_[static_cast<std::size_t>(index)];
  std::vector<iovec> parts;
  while (!peer.gone && !peer.broken && (peer.sending != nullptr || !peer.urgent.empty() || !peer.bulk.empty())) {
    if (peer.sending == nullptr) peer.sending = peer.urgent.empty() ? &peer.bulk : &peer.urgent;
    Outgoing& frame = peer.sending->front();
    std::size_t skip = peer.sent_nbytes;
    parts.clear();
    append(parts, &frame.head, sizeof frame.head, skip);
    append(parts, frame.owned.data(), frame.owned.size(), skip);
    for (const iovec& piece : frame.pieces) append(parts, piece.iov_base, piece.iov_len, skip);
    net::Moved moved;
    try {
      moved = net::send_pieces(peer.socket.get(), parts);
    } catch (const SystemError&) {
      moved.ended = true;
    }
    if (moved.ended) {  // left to the thread, because a caller may be in the middle of an operation
      peer.broken = true;
      return wake();
    }
    if (moved.nbytes == 0) return;
    peer.sent_nbytes += moved.nbytes;
    if (peer.sent_nbytes < sizeof frame.head + frame.head.nbytes) continue;
    const std::uint64_t key = frame.key;
    const std::size_t nbytes = frame.head.nbytes;
    peer.sending->pop_front();
    peer.sending = nullptr;
    peer.sent_nbytes = 0;
    if (key != 0) handler_->sent(index, key, nbytes);
  }
}

void TcpControl::pump_in(int index) {
  Peer& peer = peers_[static_cast<std::size_t>(index)];
  for (int rounds = 0; rounds < 16 && !peer.gone; ++rounds) {  // then it is the others' turn
    net::Moved moved;
    if (!peer.body) {
      moved =
          net::recv_some(peer.socket.get(), std::as_writable_bytes(std::span(&peer.head, 1)).subspan(peer.head_nbytes));
      if (moved.ended) return lose(index);
      peer.head_nbytes += moved.nbytes;
      if (peer.head_nbytes == sizeof(Frame)) begin_frame(index);
    } else if (peer.target.empty()) {
      moved = net::recv_some(peer.socket.get(), std::span(waste_).first(std::min(waste_.size(), peer.missing)));
      if (moved.ended) return lose(index);
      peer.missing -= moved.nbytes;
    } else {
      moved = net::recv_pieces(peer.socket.get(), peer.target);
      if (moved.ended) return lose(index);
      peer.missing -= moved.nbytes;
      std::size_t skip = moved.nbytes;
      std::vector<iovec> rest;
      for (const iovec& piece : peer.target) append(rest, piece.iov_base, piece.iov_len, skip);
      peer.target.swap(rest);
    }
    if (peer.body && peer.missing == 0) end_frame(index);
    if (moved.nbytes == 0) return;
  }
}

void TcpControl::begin_frame(int index) {
  Peer& peer = peers_[static_cast<std::size_t>(index)];
  const Frame& head = peer.head;
  if (head.magic != Frame::kMagic || head.kind < FrameKind::message || head.kind > FrameKind::answer ||
      head.nbytes > kMaxFrameNbytes)
    throw Error(text("a frame of kind ", static_cast<std::uint32_t>(head.kind), " and ", head.nbytes, " bytes"));
  peer.body = true;
  peer.missing = head.nbytes;
  peer.target.clear();
  if (head.kind >= FrameKind::poison) {
    peer.control.resize(head.nbytes);
    if (head.nbytes > 0) peer.target.push_back({peer.control.data(), peer.control.size()});
  } else {
    handler_->begin(index, head, peer.target);
  }
}

void TcpControl::end_frame(int index) {
  Peer& peer = peers_[static_cast<std::size_t>(index)];
  peer.body = false;
  peer.head_nbytes = 0;
  peer.last_frame_at = Clock::now();
  switch (peer.head.kind) {
    case FrameKind::poison:
      failure_.set(decode(peer.control));
      return;
    case FrameKind::bye:
      peer.bye.store(true, std::memory_order_release);
      return lose(index);
    case FrameKind::suspend:
    case FrameKind::resume: {
      const bool now = peer.head.kind == FrameKind::suspend;
      if (now != peer.suspended) suspended_ += now ? 1 : -1;
      peer.suspended = now;
      return;
    }
    case FrameKind::ask:
      return answer(index, peer.head);
    case FrameKind::answer: {
      if (peer.control.size() != sizeof(Signature)) throw Error("an answer that is cut short");
      Signature signature;
      std::memcpy(&signature, peer.control.data(), sizeof signature);
      signature.name[sizeof(signature.name) - 1] = signature.site[sizeof(signature.site) - 1] = '\0';
      peer.last_entered = signature;
      if (peer.head.id == question_) answers_[static_cast<std::size_t>(index)] = signature;
      return answered_.notify_all();
    }
    default:
      return handler_->end(index, peer.head);
  }
}

void TcpControl::answer(int peer, const Frame& question) {
  std::vector<std::byte> bytes(sizeof(Signature));
  {
    const std::lock_guard lock(entered_mutex_);
    std::memcpy(bytes.data(), &entered_, sizeof entered_);
  }
  enqueue(peer, {.kind = FrameKind::answer, .id = question.id}, std::move(bytes));
}

void TcpControl::lose(int index) {
  Peer& peer = peers_[static_cast<std::size_t>(index)];
  if (peer.gone) return;
  peer.gone = true;
  peer.urgent.clear();
  peer.bulk.clear();
  peer.sending = nullptr;
  peer.target.clear();
  if (std::exchange(peer.suspended, false)) --suspended_;
  handler_->gone(index);
  answered_.notify_all();
}

void TcpControl::broadcast_failure() {
  failure_broadcast_ = true;
  const FailureReport report = failure_.report();
  const std::vector<std::byte> bytes = encode(report);
  for (int peer = 0; peer < world_size(); ++peer) enqueue(peer, {.kind = FrameKind::poison}, bytes);
  handler_->failed();
  answered_.notify_all();
}

void TcpControl::fail(FailureReport report) noexcept {
  failure_.set(std::move(report));  // its event wakes the thread
}

void TcpControl::suspend_deadline(bool suspended) {
  const std::lock_guard lock(mutex_);
  if (suspended == own_suspended_) return;
  own_suspended_ = suspended;
  suspended_ += suspended ? 1 : -1;
  for (int peer = 0; peer < world_size(); ++peer)
    enqueue(peer, {.kind = suspended ? FrameKind::suspend : FrameKind::resume});
}

std::string TcpControl::host_of(int peer) const {
  const std::string address = net::peer_address(peers_[static_cast<std::size_t>(peer)].socket.get());
  return address.empty() ? address : text(" (host ", address, ")");
}

void TcpControl::set_entered(const Signature& signature) {
  const std::lock_guard lock(entered_mutex_);
  entered_ = signature;
}

std::vector<std::optional<Signature>> TcpControl::ask_all(double patience_s) {
  std::unique_lock lock(mutex_);
  ++question_;
  std::fill(answers_.begin(), answers_.end(), std::nullopt);
  for (int peer = 0; peer < world_size(); ++peer) enqueue(peer, {.kind = FrameKind::ask, .id = question_});
  answered_.wait_for(lock, std::chrono::duration<double>(patience_s), [this] {
    bool all = true;
    for (std::size_t r = 0; r < peers_.size(); ++r) all &= peers_[r].gone || answers_[r].has_value();
    return all || failure_.is_set();
  });
  return answers_;
}

}  // namespace zcomm::coll
