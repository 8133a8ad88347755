// Handling of message frames (messenger.hpp): grants, transfers, and matches. All on TcpControl's thread or a caller's,
// with TcpControl's mutex held.
#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "coll/tcp/messenger.hpp"

namespace zcomm::coll {
namespace {

/// The pieces of [begin, begin + nbytes).
std::vector<iovec> cut(const std::vector<iovec>& pieces, std::size_t begin, std::size_t nbytes) {
  std::vector<iovec> result;
  for (const iovec& piece : pieces) {
    const std::size_t skip = std::min(begin, piece.iov_len);
    const std::size_t taken = std::min(piece.iov_len - skip, nbytes);
    if (taken > 0) result.push_back({static_cast<std::byte*>(piece.iov_base) + skip, taken});
    begin -= skip;
    nbytes -= taken;
  }
  return result;
}

std::string shape(DType dtype, const ElementName& element, std::uint64_t count) {
  return text(element_of(dtype, element), " count=", count);
}
std::string shape(const Frame& head) { return shape(static_cast<DType>(head.dtype), head.element, head.count); }

void check_head(const Frame& head) {
  if (head.dtype > static_cast<std::uint32_t>(DType::boolean)) throw Error(text("a message of dtype ", head.dtype));
  if (head.element.text[sizeof(head.element.text) - 1] != '\0') throw Error("a message of elements without an end");
  if (head.tag < 0) throw Error(text("a message with tag ", head.tag));
  if (head.kind == FrameKind::message &&
      (head.nbytes > TcpMessenger::kEagerNbytes || head.nbytes != head.count * size_of(static_cast<DType>(head.dtype))))
    throw Error(text("a message of ", shape(head), " in ", head.nbytes, " bytes"));
  if (head.kind != FrameKind::message && head.kind != FrameKind::data && head.nbytes > 0)
    throw Error(text(head.nbytes, " bytes behind a frame that has none"));
}

}  // namespace

TcpMessenger::Entry TcpMessenger::find(bool is_send, int peer, std::uint64_t id) {
  return std::find_if(pending_.begin(), pending_.end(), [&](const Pending& pending) {
    return pending.is_send == is_send && pending.peer == peer && pending.id == id && (is_send || pending.granted);
  });
}

void TcpMessenger::begin(int peer, const Frame& head, std::vector<iovec>& target) {
  check_head(head);
  switch (head.kind) {
    case FrameKind::message:
    case FrameKind::announce:
      return arrive(peer, head, target);
    case FrameKind::grant: {
      const Entry send = find(true, peer, head.id);
      if (send == pending_.end() || send->granted) return;  // it has ended meanwhile
      send->granted = true;
      return send_next(*send);
    }
    case FrameKind::data: {
      const Entry recv = find(false, peer, head.id);
      if (recv == pending_.end()) return;
      if (head.nbytes > recv->count * size_of(recv->dtype) - recv->done_nbytes)
        throw Error(text("more elements than the message of ", shape(recv->dtype, recv->element, recv->count), " has"));
      target = cut(recv->pieces, recv->done_nbytes, head.nbytes);
      return;
    }
    case FrameKind::taken: {
      std::size_t& credit = peers_[static_cast<std::size_t>(peer)].credit;
      credit = std::min(credit + std::min<std::size_t>(head.count, kCreditNbytes), kCreditNbytes);
      return;
    }
    default:
      return be_refused(peer, head);
  }
}

/// Handles a message, or the announcement of one.
void TcpMessenger::arrive(int peer, const Frame& head, std::vector<iovec>& target) {
  const std::optional<Entry> recv = matching_.match(peer, head.tag);
  if (!recv) {
    const std::size_t waiting = head.nbytes + matching_.early_nbytes(peer);
    if (waiting > kCreditNbytes) throw Error(text(waiting, " bytes of messages that no recv has asked for"));
    auto& early = matching_.keep(peer, head.tag, head, head.kind == FrameKind::announce, head.nbytes);
    early.payload.resize(head.nbytes);
    if (head.nbytes > 0) target.push_back({early.payload.data(), head.nbytes});
    return;
  }
  if (!agree(*recv, peer, head)) return;
  accept(**recv, peer, head);
  if (head.kind == FrameKind::message) target = (*recv)->pieces;
}

void TcpMessenger::end(int peer, const Frame& head) {
  if (head.kind == FrameKind::message) {
    const Entry recv = find(false, peer, head.id);
    if (recv != pending_.end()) {
      give_credit(peer, head.nbytes);
      recv->granted = false;  // no more bytes will come
      return end_pending(recv);
    }
    auto* const early = matching_.find_kept(peer, [&](const Frame& kept) { return kept.id == head.id; });
    if (early == nullptr) return give_credit(peer, head.nbytes);  // refused, or given up
    if (const auto late = matching_.complete(*early)) take(*late, *early);
  } else if (head.kind == FrameKind::data) {
    const Entry recv = find(false, peer, head.id);
    if (recv == pending_.end()) return;
    recv->done_nbytes += head.nbytes;
    if (recv->done_nbytes == recv->count * size_of(recv->dtype)) end_pending(recv);
  }
}

/// Receives a complete message, or an announcement, that arrived before `recv`.
void TcpMessenger::take(Entry recv, Messages::Early& message) {
  const int peer = message.peer;
  const Frame head = message.head;
  // Spare messages keep no payload here: together they could hold the credit of all peers.
  const std::vector<std::byte> bytes = std::move(message.payload);
  matching_.drop(message);
  const bool is_small = head.kind == FrameKind::message;
  if (is_small) give_credit(peer, bytes.size());
  if (!agree(recv, peer, head)) return;
  accept(*recv, peer, head);
  if (!is_small) return;
  const std::byte* from = bytes.data();
  for (const iovec& piece : recv->pieces) {
    std::memcpy(piece.iov_base, from, piece.iov_len);
    from += piece.iov_len;
  }
  recv->granted = false;
  end_pending(recv);
}

void TcpMessenger::give_credit(int peer, std::size_t nbytes) {
  if (nbytes > 0) control_.enqueue(peer, {.kind = FrameKind::taken, .count = nbytes});
}

/// False: `recv` has ended with a mismatch, and the sender gets a refusal.
bool TcpMessenger::agree(Entry recv, int peer, const Frame& head) {
  if (head.dtype == static_cast<std::uint32_t>(recv->dtype) && head.element == recv->element &&
      head.count == recv->count)
    return true;
  control_.enqueue(peer, {.kind = FrameKind::refuse,
                          .tag = recv->tag,
                          .dtype = static_cast<std::uint32_t>(recv->dtype),
                          .id = head.id,
                          .count = recv->count,
                          .element = recv->element});
  end_pending(recv,
              std::make_exception_ptr(CollectiveMismatch(mismatch(peer, control_.rank(), recv->tag, shape(head),
                                                                  shape(recv->dtype, recv->element, recv->count)))));
  return false;
}

void TcpMessenger::be_refused(int peer, const Frame& head) {
  const Entry send = find(true, peer, head.id);
  const std::string theirs = shape(head);
  if (send == pending_.end()) {  // a small one: a waiting recv from that peer throws it, or else the next call
    std::string what = mismatch(control_.rank(), peer, head.tag, "another dtype or count in an earlier call", theirs);
    if (const auto waiting = matching_.remove_first(peer))
      return end_pending(*waiting, std::make_exception_ptr(CollectiveMismatch(what)));
    peers_[static_cast<std::size_t>(peer)].complaint = std::move(what);
    return;
  }
  const std::string ours = shape(send->dtype, send->element, send->count);
  end_pending(send,
              std::make_exception_ptr(CollectiveMismatch(mismatch(control_.rank(), peer, head.tag, ours, theirs))));
}

std::string TcpMessenger::mismatch(int from, int to, int tag, const std::string& sent,
                                   const std::string& wanted) const {
  return text("rank ", from, " sent ", sent, " to rank ", to, " with tag ", tag, ", which called recv for ", wanted);
}

void TcpMessenger::accept(Pending& recv, int peer, const Frame& head) {
  recv.peer = peer;
  recv.id = head.id;
  recv.granted = true;
  if (recv.source != nullptr) *recv.source = peer;
  if (head.kind == FrameKind::announce) control_.enqueue(peer, {.kind = FrameKind::grant, .id = head.id});
}

void TcpMessenger::send_next(Pending& send) {
  const std::size_t left = send.count * size_of(send.dtype) - send.done_nbytes;
  const std::size_t nbytes = std::min(left, TcpControl::kMaxFrameNbytes);
  control_.enqueue_bulk(send.peer,
                        {.kind = FrameKind::data, .dtype = static_cast<std::uint32_t>(send.dtype), .id = send.id},
                        cut(send.pieces, send.done_nbytes, nbytes), send.id);
}

void TcpMessenger::sent(int peer, std::uint64_t key, std::size_t nbytes) {
  const Entry send = find(true, peer, key);
  if (send == pending_.end()) return;
  send->done_nbytes += nbytes;
  if (send->done_nbytes < send->count * size_of(send->dtype)) return send_next(*send);
  send->granted = false;
  end_pending(send);
}

}  // namespace zcomm::coll
