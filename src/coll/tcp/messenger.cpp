// See messenger.hpp. Here: the callers' side and the end of messages; messages.cpp handles frames.
#include "coll/tcp/messenger.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "base/notices.hpp"

namespace zcomm::coll {
namespace {

constexpr double kSlice_s = 0.05;           // between checks for signals
constexpr std::chrono::seconds kAnswer{2};  // for a rank to answer that it is alive

template <class Buffers>
std::uint64_t total_of(const Buffers& buffers) {
  std::uint64_t total = 0;
  for (const auto& buffer : buffers) total += buffer.count;
  return total;
}

template <class Buffers>
std::vector<iovec> pieces_of(const Buffers& buffers, std::size_t size) {
  std::vector<iovec> pieces;
  for (const auto& buffer : buffers)
    if (buffer.count > 0) pieces.push_back({const_cast<void*>(buffer.data), buffer.count * size});
  return pieces;
}

}  // namespace

TcpMessenger::TcpMessenger(TcpControl& post, const WaitTimes& times)
    : control_(post),
      times_(times),
      peers_(static_cast<std::size_t>(post.world_size())),
      matching_(post.world_size()),
      give_up_(std::make_shared<GiveUp>([this](const Completion& completion) { give_up(completion); })) {
  control_.start(*this);
}

Work TcpMessenger::send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call) {
  std::unique_lock lock(control_.mutex());
  require_open(dst);
  PeerState& peer = peers_[static_cast<std::size_t>(dst)];
  const std::uint64_t count = total_of(buffers), id = peer.next_id++;
  if (control_.is_gone(dst)) {
    Pending pending = make(true, dst, tag, dtype, call);
    pending.count = count;
    std::rethrow_exception(lost(pending, dst));
  }
  const std::size_t nbytes = count * size_of(dtype);
  const Frame head{.tag = tag,
                   .dtype = static_cast<std::uint32_t>(dtype),
                   .id = id,
                   .count = count,
                   .element = ElementName(call.element)};
  if (nbytes <= std::min(kEagerNbytes, peer.credit)) {
    std::vector<std::byte> bytes(nbytes);
    std::byte* to = bytes.data();
    for (const iovec& piece : pieces_of(buffers, size_of(dtype))) {
      std::memcpy(to, piece.iov_base, piece.iov_len);
      to += piece.iov_len;
    }
    peer.credit -= nbytes;
    Frame message = head;
    message.kind = FrameKind::message;
    control_.enqueue(dst, message, std::move(bytes));
    return {};
  }
  Pending pending = make(true, dst, tag, dtype, call);
  pending.count = count, pending.id = id;
  pending.pieces = pieces_of(buffers, size_of(dtype));
  const std::shared_ptr<Completion> completion = pending.completion;
  pending_.push_back(std::move(pending));
  Work work(completion);
  Frame announce = head;
  announce.kind = FrameKind::announce;
  control_.enqueue(dst, announce);
  return finish(std::move(work), completion, lock, call);
}

Work TcpMessenger::recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call, int* source) {
  std::unique_lock lock(control_.mutex());
  require_open(src);
  Pending pending = make(false, src, tag, dtype, call);
  pending.count = total_of(buffers), pending.source = source;
  pending.pieces = pieces_of(buffers, size_of(dtype));
  Messages::Early* const early = matching_.find_early(src, tag);
  if (early == nullptr && (src < 0 ? all_gone() : control_.is_gone(src))) std::rethrow_exception(lost(pending, src));
  const std::shared_ptr<Completion> completion = pending.completion;
  pending_.push_back(std::move(pending));
  Work work(completion);
  const Entry recv = std::prev(pending_.end());
  if (early != nullptr)
    take(recv, *early);
  else
    matching_.post(recv, src, tag);
  return finish(std::move(work), completion, lock, call);
}

/// Waits for a blocking call.
Work TcpMessenger::finish(Work work, std::shared_ptr<Completion> completion, std::unique_lock<std::mutex>& lock,
                          const Call& call) {
  control_.wake();  // there is a new deadline
  lock.unlock();
  if (call.async) return work;
  try {
    while (!work.wait_for(kSlice_s)) check_interrupt();
  } catch (...) {
    lock.lock();
    const auto entry = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Pending& pending) { return pending.completion == completion; });
    if (entry != pending_.end()) end_pending(entry);
    lock.unlock();
    throw;
  }
  work.wait();
  return {};
}

void TcpMessenger::require_open(int peer) {
  if (closed_) throw Error("the communicator is closed");
  control_.failure().throw_if_set({});
  if (peer < 0) return;
  if (!control_.has_link(peer))
    throw Unsupported(text("rank ", control_.rank(), " has no link for messages with rank ", peer));
  std::string& complaint = peers_[static_cast<std::size_t>(peer)].complaint;
  if (!complaint.empty()) throw CollectiveMismatch(std::exchange(complaint, {}));
}

bool TcpMessenger::all_gone() const {
  for (int peer = 0; peer < control_.world_size(); ++peer)
    if (!control_.is_gone(peer)) return false;
  return true;
}

TcpMessenger::Pending TcpMessenger::make(bool is_send, int peer, int tag, DType dtype, const Call& call) {
  Pending pending{is_send, peer, tag, dtype, ElementName(call.element), 0, {}, call.site};
  pending.clock = LateClock(times_);
  pending.clock.start(Clock::now());
  pending.completion = completions_.acquire();
  return pending;
}

std::string TcpMessenger::describe(const Pending& pending) const {
  std::string peer = pending.peer < 0 ? "any rank" : text("rank ", pending.peer);
  std::string what = text(pending.is_send ? "send to " : "recv from ", peer, ", tag ", pending.tag, ", ",
                          element_of(pending.dtype, pending.element), " count=", pending.count);
  return *pending.site != '\0' ? text(what, " at ", pending.site) : what;
}

std::exception_ptr TcpMessenger::lost(const Pending& pending, int peer) const {
  const bool left = peer >= 0 && control_.has_closed(peer);
  return std::make_exception_ptr(
      PeerLost(peer, text(peer < 0 ? "all ranks have left"
                                   : text("rank ", peer, left ? " left (closed its communicator)" : " died or left"),
                          "; ", describe(pending), " cannot finish")));
}

/// Ends a pending message; its buffers are not touched afterwards.
void TcpMessenger::end_pending(Entry entry, std::exception_ptr error) {
  if (!entry->is_send) matching_.remove(entry);
  if (entry->granted && entry->is_send) control_.withdraw(entry->peer, entry->id);
  if (entry->granted && !entry->is_send) control_.discard_incoming(entry->peer, entry->id);
  if (!error && entry->clock.has_warned())
    post_notice(text(describe(*entry), " ended after ", entry->clock.waited_s(Clock::now()), " s"));
  const std::shared_ptr<Completion> completion = std::move(entry->completion);
  pending_.erase(entry);
  completion->finish(std::move(error));
}

Clock::time_point TcpMessenger::expire(Clock::time_point now) {
  auto next = now + std::chrono::hours(1);
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    const auto current = entry++;
    LateClock& clock = current->clock;
    if (clock.next() <= now && control_.any_suspended()) clock.start(now);
    if (clock.next() <= now && !look_at_late(*current, now)) {
      const char* const what = current->granted ? "was not complete" : "found no counterpart";
      end_pending(current, std::make_exception_ptr(
                               Timeout(text(describe(*current), " ", what, " within ", clock.waited_s(now), " s"))));
    } else {
      const bool has_asked = current->asked != Clock::time_point{};
      next = std::min(next, has_asked ? current->asked + kAnswer : clock.next());
    }
  }
  return next;
}

/// Called when the warning or the deadline is due; false: the message has ended. Asks the peer for a sign of life
/// first.
bool TcpMessenger::look_at_late(Pending& pending, Clock::time_point now) {
  LateClock& clock = pending.clock;
  const bool is_over = clock.is_over(now);
  if (is_over && clock.is_exact()) return false;
  bool has_answered = !all_gone();
  if (pending.peer >= 0) {
    if (pending.asked == Clock::time_point{}) {
      pending.asked = now;
      control_.ask(pending.peer);
    }
    has_answered = control_.last_frame_at(pending.peer) >= pending.asked;
    if (!has_answered && now < pending.asked + kAnswer) return true;
    pending.asked = {};
  }
  if (is_over) return has_answered && clock.extend(now);
  clock.set_warned();
  post_notice(late_message(pending, has_answered));
  return true;
}

std::string TcpMessenger::late_message(const Pending& pending, bool has_answered) const {
  std::string what =
      text(describe(pending), ": rank ", control_.rank(), " has waited ", pending.clock.waited_s(Clock::now()),
           " s; it ", pending.granted ? "is not complete" : "has found no counterpart");
  if (pending.peer < 0) return what;
  what += text("; rank ", pending.peer, control_.host_of(pending.peer), " ");
  const Signature& last_entered = control_.last_entered(pending.peer);
  if (!has_answered) return what + "does not answer (is its process stopped?)";
  if (last_entered.sequence == 0) return what + "has called no collective yet";
  return what + text("last entered operation ", last_entered.sequence, ", ", coll::describe(last_entered));
}

void TcpMessenger::gone(int peer) {
  const bool all = all_gone();
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    const auto current = entry++;
    if (current->peer == peer || (current->peer < 0 && all)) end_pending(current, lost(*current, peer));
  }
}

void TcpMessenger::failed() {
  std::exception_ptr error;
  try {
    control_.failure().throw_if_set({});
  } catch (...) {
    error = std::current_exception();
  }
  while (!pending_.empty()) end_pending(pending_.begin(), error);
}

void TcpMessenger::give_up(const Completion& completion) noexcept {
  const std::lock_guard lock(control_.mutex());
  const auto entry = std::find_if(pending_.begin(), pending_.end(),
                                  [&](const Pending& pending) { return pending.completion.get() == &completion; });
  if (entry == pending_.end()) return;
  end_pending(entry, std::make_exception_ptr(Error(text(describe(*entry), " was given up (interrupted by a signal)"))));
}

void TcpMessenger::close() noexcept {
  give_up_->detach();
  control_.close();
  const std::lock_guard lock(control_.mutex());
  closed_ = true;
  while (!pending_.empty())
    end_pending(
        pending_.begin(),
        std::make_exception_ptr(Error(text("communicator was closed before ", describe(pending_.front()), " ended"))));
}

}  // namespace zcomm::coll
