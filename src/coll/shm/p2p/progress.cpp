// The messages of one rank (coll/shm/p2p/progress.hpp).
#include "coll/shm/p2p/progress.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/notices.hpp"

namespace zcomm::coll {

MessageProgress::MessageProgress(std::shared_ptr<net::Mesh> mesh, const HostMemory& host, const WaitTimes& times)
    : mesh_(std::move(mesh)),
      host_(host),
      rank_(host.rank()),
      world_size_(host.world_size()),
      times_(times),
      memory_(*mesh_, host.slot_nbytes(), host.slot_count(), times.timeout_s),
      matching_(world_size_, Envelope::kInlineNbytes) {
  senders_.reserve(static_cast<std::size_t>(world_size_));
  receivers_.reserve(static_cast<std::size_t>(world_size_));
  for (int peer = 0; peer < world_size_; ++peer) {
    senders_.emplace_back(memory_, peer, pool_);
    receivers_.emplace_back(memory_, peer, pool_, matching_);
  }
}

Transfer& MessageProgress::send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call) {
  Transfer& send = pool_.take(buffers, dtype, tag, call);
  send.clock = LateClock(times_);
  send.start(Transfer::Stage::queued, dst, nullptr);
  try {
    if (const std::string why = why_gone(dst); !why.empty())
      throw PeerLost(dst, text(why, "; ", describe(send), " cannot be done"));
    throw_late_mismatch(dst);
    if (const auto error = sender(dst).failure()) std::rethrow_exception(error);
  } catch (...) {
    pool_.give_back(send);
    throw;
  }
  sender(dst).post(send);
  pass(dst);
  return send;
}

Transfer& MessageProgress::recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call,
                                int* source) {
  for (int peer = 0; peer < world_size_; ++peer)
    if (peer != rank_ && (src == peer || src == -1)) throw_late_mismatch(peer);
  Transfer& receive = pool_.take(buffers, dtype, tag, call);
  receive.clock = LateClock(times_);
  receive.start(Transfer::Stage::posted, src, source);
  if (auto* const early = matching_.find_early(src, tag)) {
    const int peer = early->peer;
    receiver(peer).accept(receive, early->head, early->payload.data());
    matching_.drop(*early);
    pass(peer);
  } else {
    matching_.post(&receive, src, tag);
    if (src >= 0)
      pass(src);
    else
      pass();
  }
  return receive;
}

void MessageProgress::throw_late_mismatch(int peer) {
  sender(peer).progress();
  if (sender(peer).has_late_mismatch()) throw CollectiveMismatch(sender(peer).take_late_mismatch());
}

bool MessageProgress::concerns(int peer) {
  return peer != rank_ && (matching_.wants(peer) || !receiver(peer).is_idle() || !sender(peer).is_idle());
}

bool MessageProgress::pass() {
  bool moved = false;
  // Starts at another rank each time, so that a receive from any rank starves none.
  turn_ = (turn_ + 1) % world_size_;
  for (int i = 0; i < world_size_; ++i) {
    const int peer = (turn_ + i) % world_size_;
    if (concerns(peer)) moved |= pass(peer);
  }
  return moved;
}

bool MessageProgress::pass(int peer) {
  const bool sent = sender(peer).progress();
  if (sender(peer).has_late_mismatch()) {
    // A receive that waits for this rank ends now, because its message is unlikely to come.
    if (const auto waiting = matching_.remove_first(peer))
      pool_.finish(**waiting, std::make_exception_ptr(CollectiveMismatch(sender(peer).take_late_mismatch())));
  }
  return receiver(peer).progress() || sent;
}

template <class Function>
void MessageProgress::each(const Function& function) const {
  for (const Sender& sender : senders_) sender.each(function);
  for (const Receiver& receiver : receivers_) receiver.each(function);
  matching_.each_posted([&](Transfer* receive) { function(*receive); });
}

Clock::time_point MessageProgress::look_around(Clock::time_point now) {
  for (int peer = 0; peer < world_size_; ++peer)
    if (concerns(peer)) look_at(peer);
  some_.clear();
  each([&](Transfer& transfer) {
    if (now >= transfer.clock.next()) some_.push_back(&transfer);
  });
  for (Transfer* overdue : some_)
    if (!overdue->done) look_at_late(*overdue, now);
  auto next = Clock::time_point::max();
  each([&](const Transfer& transfer) { next = std::min(next, transfer.clock.next()); });
  return next;
}

void MessageProgress::look_at(int peer) {
  const std::string why = why_gone(peer);
  const std::exception_ptr out = sender(peer).failure(), in = receiver(peer).failure();
  if (why.empty() && !out && !in) return;
  while (pass(peer)) continue;  // data sent before the end counts
  if (!why.empty()) {
    end_peer(peer, [&](const Transfer& transfer) {
      return std::make_exception_ptr(PeerLost(peer, text(why, "; ", describe(transfer), " cannot finish")));
    });
    return;
  }
  if (out) sender(peer).fail(Breach::other, "the receiver gave up", [&](const Transfer&) { return out; });
  if (in) {
    receiver(peer).fail(Breach::other, "the sender gave up", [&](const Transfer&) { return in; });
    end_posted(peer, [&](const Transfer&) { return in; });
  }
}

void MessageProgress::end_peer(int peer, const ErrorOf& error_of) {
  sender(peer).fail(Breach::none, "", error_of);
  receiver(peer).fail(Breach::none, "", error_of);
  end_posted(peer, error_of);
  // From any rank: a rank that died may have been the sender; another can replace one that left in order.
  bool nobody_left = true;
  for (int other = 0; other < world_size_; ++other) nobody_left &= other == rank_ || is_gone(other);
  if (!nobody_left && mesh_->fate(peer) != net::Fate::died) return;
  while (pass()) continue;
  end_posted(-1, error_of);
}

void MessageProgress::end_posted(int peer, const ErrorOf& error_of) {
  some_.clear();
  while (const auto receive = matching_.remove_first(peer)) pool_.finish(**receive, error_of(**receive));
}

void MessageProgress::end_all(const ErrorOf& error_of) {
  for (int peer = 0; peer < world_size_; ++peer) {
    sender(peer).fail(Breach::none, "", error_of);
    receiver(peer).fail(Breach::none, "", error_of);
    end_posted(peer, error_of);
  }
  end_posted(-1, error_of);
}

Transfer* MessageProgress::find(const Completion& completion) const {
  Transfer* found = nullptr;
  each([&](Transfer& transfer) {
    if (transfer.completion.get() == &completion) found = &transfer;
  });
  return found;
}

void MessageProgress::look_at_late(Transfer& transfer, Clock::time_point now) {
  bool suspended = is_suspended(rank_);
  for (int peer = 0; peer < world_size_; ++peer)
    if (transfer.peer == peer || transfer.peer == -1) suspended |= is_suspended(peer);
  if (suspended) return transfer.clock.start(now);
  if (!transfer.clock.is_over(now)) {
    transfer.clock.set_warned();
    return post_notice(late_message(transfer, false));
  }
  if (shows_life(transfer) && transfer.clock.extend(now)) return;
  const std::string what = late_message(transfer, true);
  cancel(transfer, Breach::late, what, std::make_exception_ptr(Timeout(what)));
}

/// Asks the ranks that may end it; a rank that has ended shows no life.
bool MessageProgress::shows_life(const Transfer& transfer) const {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_ || (transfer.peer != peer && transfer.peer != -1)) continue;
    const auto process = mesh_->process(peer);
    if (!process || !process->is_stopped) return true;
  }
  return false;
}

void MessageProgress::cancel(Transfer& transfer, Breach::Cause cause, const std::string& what,
                             const std::exception_ptr& error) {
  const ErrorOf error_of = [&](const Transfer& other) {
    return &other == &transfer ? error : make_error(cause, text(describe(other), " cannot finish since: ", what));
  };
  switch (transfer.stage) {
    case Transfer::Stage::queued:
      sender(transfer.peer).remove(transfer);
      break;
    case Transfer::Stage::posted:
      matching_.remove(&transfer);
      break;
    case Transfer::Stage::announced:
    case Transfer::Stage::sending:
      return sender(transfer.peer).fail(cause, what, error_of);
    case Transfer::Stage::receiving:
      return receiver(transfer.peer).fail(cause, what, error_of);
  }
  pool_.finish(transfer, error);
}

std::string MessageProgress::late_message(const Transfer& transfer, bool has_ended) const {
  static constexpr const char* words[] = {"to take earlier messages", "to ask for it", "to take its data", "to send it",
                                          "to bring its data"};
  std::string what = text(describe(transfer), ": rank ", rank_, has_ended ? " waited " : " has waited ",
                          transfer.clock.waited_s(Clock::now()), " s for ",
                          transfer.peer < 0 ? std::string("any rank") : text("rank ", transfer.peer), " ",
                          words[static_cast<int>(transfer.stage)]);
  if (transfer.moved > 0) what += text(" (", transfer.moved, " of ", transfer.nbytes, " bytes have moved)");
  for (int peer = 0; peer < world_size_; ++peer)
    if (peer != rank_ && (transfer.peer == peer || transfer.peer == -1)) what += state_of(peer);
  return what;
}

/// Its unexpected messages, and whether its process is stopped.
std::string MessageProgress::state_of(int peer) const {
  std::string what = receivers_[static_cast<std::size_t>(peer)].unasked();
  const auto process = mesh_->process(peer);
  if (process && process->is_stopped)
    what += text("; rank ", peer, " (process ", process->pid, " of this host) is stopped (SIGSTOP, or a debugger)");
  return what;
}

std::string MessageProgress::why_gone(int peer) const {
  const net::Fate known = mesh_->fate(peer);
  const net::Fate fate = net::fate_of(known, host_.block(peer).closed.load(std::memory_order_acquire) != 0);
  return fate == net::Fate::alive ? "" : net::describe(net::Loss{peer, fate});
}

bool MessageProgress::is_suspended(int peer) const {
  return host_.block(peer).suspended.load(std::memory_order_acquire) != 0;
}

std::size_t MessageProgress::nbytes() const {
  const auto used = std::count_if(senders_.begin(), senders_.end(), [](const Sender& o) { return o.was_used(); });
  return static_cast<std::size_t>(used) * memory_.channel_nbytes();
}

}  // namespace zcomm::coll
