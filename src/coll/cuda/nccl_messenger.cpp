// Matching messages on the host (coll/cuda/nccl_messenger.hpp).
#include "coll/cuda/nccl_messenger.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "base/notices.hpp"

namespace zcomm::coll {
namespace {

constexpr double kLook_s = 0.05;  // between looks at signals, deadlines and lost ranks
constexpr double kLastMessages_s = 2.0;
constexpr int kTag = 0;

std::string mismatch(int from, int to, int tag, const std::string& sent, const std::string& wanted) {
  return text("rank ", from, " sent ", sent, " to rank ", to, " with tag ", tag, ", which called recv for ", wanted);
}

Call frame_call() { return Call("message by nccl", true); }

}  // namespace

NcclMessenger::NcclMessenger(Communicator& host, std::shared_ptr<net::Mesh> watched,
                             std::shared_ptr<device::Device> device, const NcclLibrary& nccl, double timeout_s)
    : host_(host),
      watched_(std::move(watched)),
      device_(std::move(device)),
      nccl_(nccl),
      times_{.timeout_s = timeout_s},
      failures_(std::make_shared<MessageFailures>()),
      liveness_(std::make_shared<DeviceLiveness>(device_, failures_, host.rank(), 2 * timeout_s + 5)),
      tickets_(liveness_),
      peers_(static_cast<std::size_t>(host.world_size())),
      matching_(host.world_size()),
      slots_(std::make_shared<MessageSlots>(device_, kEagerNbytes, kSlots)),
      give_up_(std::make_shared<GiveUp>([this](const Completion& completion) { give_up(completion); })) {}

// ---- calls ----

Work NcclMessenger::send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call) {
  Lock lock(mutex_);
  require_open(dst);
  const MessagePtr send = make(true, dst, tag, dtype, call);
  for (const ConstBuffer& buffer : buffers) {
    send->count += buffer.count;
    if (buffer.count > 0) send->pieces.push_back({const_cast<void*>(buffer.data), buffer.count});
  }
  send->id = peer_at(dst).next_id++;
  if (const auto error = lost(*send)) std::rethrow_exception(error);
  make_eager(*send, call.stream);
  send->ticket = tickets_.called(call.stream);
  if (!send->is_eager) send->completion = completions_.acquire();
  start_reader();
  sends_.push_back(send);
  post(dst, {.kind = FrameKind::announce,
             .tag = tag,
             .dtype = static_cast<std::uint32_t>(dtype),
             .id = send->id,
             .count = send->count,
             .element = send->element});
  return finish(send->is_eager ? Work() : Work(send->completion), lock, call);
}

Work NcclMessenger::recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call,
                         int* source) {
  Lock lock(mutex_);
  require_open(src);
  const MessagePtr recv = make(false, src, tag, dtype, call);
  recv->source = source;
  for (const Buffer& buffer : buffers) {
    recv->count += buffer.count;
    if (buffer.count > 0) recv->pieces.push_back(buffer);
  }
  recv->ticket = tickets_.called(call.stream);
  recv->completion = completions_.acquire();
  start_reader();
  Work work(recv->completion);
  if (auto* const early = matching_.find_early(src, tag)) {
    const Frame head = early->head;
    const int peer = early->peer;
    matching_.drop(*early);
    take(recv, peer, head);
  } else {
    matching_.post(recv, src, tag);
  }
  return finish(std::move(work), lock, call);
}

/// Waits for a blocking call.
Work NcclMessenger::finish(Work work, Lock& lock, const Call& call) {
  lock.unlock();
  if (call.async) return work;
  try {
    while (!work.wait_for(kLook_s)) check_interrupt();
  } catch (...) {
    work.give_up();
    throw;
  }
  work.wait();
  return {};
}

NcclMessenger::MessagePtr NcclMessenger::make(bool is_send, int peer, int tag, DType dtype, const Call& call) {
  auto message = std::make_shared<NcclMessage>(
      NcclMessage{is_send, peer, tag, dtype, ElementName(call.element), 0, {}, call.site});
  message->number = ++last_number_;
  message->clock = LateClock(times_);
  message->clock.start(Clock::now());
  return message;
}

void NcclMessenger::require_open(int peer) {
  if (closing_) throw Error("the communicator is closed");
  if (peer < 0) return;
  if (const auto complaint = std::exchange(peer_at(peer).complaint, nullptr)) std::rethrow_exception(complaint);
}

/// Copies a small message, on its caller's stream, while there is a slot.
void NcclMessenger::make_eager(NcclMessage& message, std::uintptr_t stream) {
  const std::size_t size = size_of(message.dtype), nbytes = message.count * size;
  if (nbytes > kEagerNbytes) return;
  if (nbytes > 0) {
    message.copy = slots_->take();
    if (!message.copy) return;
    auto* at = static_cast<std::byte*>(message.copy.get());
    for (const Buffer& piece : message.pieces) {
      liveness_->copy(stream, at, piece.data, piece.count * size);
      at += piece.count * size;
    }
    message.pieces = {{message.copy.get(), message.count}};
  }
  message.is_eager = true;
}

void NcclMessenger::start_reader() {
  if (reader_.joinable()) return;
  host_.suspend_deadline();  // frames come when they come; messages have deadlines here
  reader_ = std::thread([this] { read(); });
}

void NcclMessenger::suspend_deadline(bool suspended) {
  const Lock lock(mutex_);
  if (closed_) return;
  suspended_ = suspended;
  for (int peer = 0; peer < host_.world_size(); ++peer) {
    if (peer == host_.rank()) continue;
    post(peer, {.kind = suspended ? FrameKind::suspend : FrameKind::resume});
    for (Direction* const direction : {&peer_at(peer).out, &peer_at(peer).in})
      if (direction->channel) direction->channel->suspend_deadline(is_suspended(peer));
  }
}

bool NcclMessenger::is_suspended(int peer) const {
  const auto is = [](const Peer& p) { return p.is_suspended; };
  return suspended_ ||
         (peer < 0 ? std::any_of(peers_.begin(), peers_.end(), is) : is(peers_[static_cast<std::size_t>(peer)]));
}

// ---- frames ----

void NcclMessenger::post(int peer, const Frame& frame) {
  static_assert(std::is_trivially_copyable_v<Frame>);
  std::erase_if(outgoing_, [](const Outgoing& sent) { return sent.work.done(); });
  Outgoing& next = outgoing_.emplace_back();
  next.frame = frame;
  const ConstBuffer bytes{&next.frame, sizeof(Frame)};
  try {
    next.work = host_.send({&bytes, 1}, DType::uint8, peer, kTag, frame_call());
  } catch (const Error&) {  // the peer is lost, or the communicator closed: look_around() ends its messages
    outgoing_.pop_back();
  }
}

void NcclMessenger::read() noexcept {
  while (read_one()) {
  }
}

/// False at the end.
bool NcclMessenger::read_one() {
  Frame frame;
  int source = -1;
  std::exception_ptr error;
  try {
    const Buffer bytes{&frame, sizeof(frame)};
    Work work = host_.recv({&bytes, 1}, DType::uint8, -1, kTag, frame_call(), &source);
    while (!work.wait_for(kLook_s)) look_around();
    work.wait();
  } catch (const PeerLost&) {
    source = -1;
  } catch (...) {
    error = std::current_exception();
  }
  Lock lock(mutex_);
  if (closed_) return false;
  if (source >= 0 && !error) {
    arrive(source, frame);
    return true;
  }
  // Ranks are lost, or the host's communicator has failed: nothing is certain to come.
  lock.unlock();
  look_around();
  lock.lock();
  changed_.wait_for(lock, std::chrono::milliseconds(10), [this] { return closed_; });
  return !closed_;
}

void NcclMessenger::arrive(int peer, const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::announce:
      if (const auto recv = matching_.match(peer, frame.tag))
        take(*recv, peer, frame);
      else
        matching_.keep(peer, frame.tag, frame, true);
      return;
    case FrameKind::grant:
      return be_granted(peer, frame);
    case FrameKind::refuse:
      return be_refused(peer, frame);
    case FrameKind::withdraw:
      if (auto* const kept = matching_.find_kept(peer, [&](const Frame& head) { return head.id == frame.id; }))
        matching_.drop(*kept);
      return;
    case FrameKind::broken:
      return be_broken(peer, frame);
    case FrameKind::suspend:
    case FrameKind::resume:
      peer_at(peer).is_suspended = frame.kind == FrameKind::suspend;
      for (Direction* const direction : {&peer_at(peer).out, &peer_at(peer).in})
        if (direction->channel) direction->channel->suspend_deadline(is_suspended(peer));
      return;
  }
}

std::string NcclMessenger::side_of(const Frame& frame) {
  return text(element_of(static_cast<DType>(frame.dtype), frame.element), " count=", frame.count);
}

/// A send has found its recv, on the receiver.
void NcclMessenger::take(const MessagePtr& recv, int peer, const Frame& head) {
  recv->peer = peer;
  if (recv->source != nullptr) *recv->source = peer;
  recv->id = head.id;
  if (static_cast<DType>(head.dtype) != recv->dtype || head.count != recv->count || !(head.element == recv->element)) {
    Frame refusal = head;
    refusal.kind = FrameKind::refuse;
    refusal.dtype = static_cast<std::uint32_t>(recv->dtype), refusal.count = recv->count;
    refusal.element = recv->element;
    post(peer, refusal);
    return end(recv, std::make_exception_ptr(
                         CollectiveMismatch(mismatch(peer, host_.rank(), head.tag, side_of(head), side_of(refusal)))));
  }
  Direction& in = peer_at(peer).in;
  if (in.channel && in.channel->has_failed()) retire_channel(in);
  try {
    if (!in.channel) in.id = NcclComm(device_, nccl_).make_id();
  } catch (...) {
    tell_broken(peer, false, in.epoch + 1, "NCCL has no id for it");
    return end(recv, std::current_exception());
  }
  if (!in.channel) ++in.epoch;
  post(peer, {.kind = FrameKind::grant, .tag = head.tag, .id = head.id, .epoch = in.epoch, .nccl = in.id});
  give_to_channel(recv, in, peer, false);
}

/// The same on the sender.
void NcclMessenger::be_granted(int peer, const Frame& frame) {
  Direction& out = peer_at(peer).out;
  const MessagePtr send = find_send(peer, frame.id);
  if (!send) {  // withdrawn meanwhile, so that the order of this epoch is broken
    const std::string why = text("rank ", host_.rank(), " has given up a message that was on its way");
    if (out.channel && out.epoch == frame.epoch) return out.channel->fail(std::make_exception_ptr(Error(why)), false);
    if (out.dead < frame.epoch) tell_broken(peer, true, out.dead = frame.epoch, why);
    return;
  }
  if (frame.epoch <= out.dead) return end_told(send, broken_error(peer, "earlier messages have failed"));
  if (!out.channel || out.epoch != frame.epoch) {
    retire_channel(out);
    out.epoch = frame.epoch, out.id = frame.nccl;
  }
  sends_.remove(send);
  changed_.notify_all();
  give_to_channel(send, out, peer, true);
}

void NcclMessenger::give_to_channel(const MessagePtr& message, Direction& direction, int peer, bool sends) {
  Signature& signature = message->ticket->signature = Signature{};
  signature.sequence = message->number;
  const std::string name = text("rank ", peer, ", tag ", message->tag, " count=", message->count);
  set_name(signature, name.c_str(), message->site);
  signature.kind = sends ? OpKind::send : OpKind::recv;
  if (!direction.channel) {
    NcclChannel::Owner& owner = *this;
    direction.channel = std::make_shared<NcclChannel>(NcclChannel::Ends{peer, sends, direction.epoch, direction.id},
                                                      device_, nccl_, watched_, times_.timeout_s, owner);
    direction.channel->suspend_deadline(is_suspended(peer));
  }
  if (const auto error = direction.channel->push(message)) end_told(message, error);
}

void NcclMessenger::be_refused(int peer, const Frame& frame) {
  const MessagePtr send = find_send(peer, frame.id);
  if (!send) return;
  Frame own = frame;
  own.dtype = static_cast<std::uint32_t>(send->dtype), own.count = send->count, own.element = send->element;
  const auto error = std::make_exception_ptr(
      CollectiveMismatch(mismatch(host_.rank(), peer, frame.tag, side_of(own), side_of(frame))));
  end_told(send, error);
}

/// The program learns it, also of a small send.
void NcclMessenger::end_told(const MessagePtr& message, const std::exception_ptr& error) {
  if (message->is_eager) complain(message->peer, error);
  end(message, error);
}

/// About a small send, which has ended for its caller: a recv that waits for the same rank throws it, because its
/// message is unlikely to come, or else the next call with that rank.
void NcclMessenger::complain(int peer, const std::exception_ptr& error) {
  if (const auto recv = matching_.remove_first(peer)) return end(*recv, error);
  peer_at(peer).complaint = error;
}

void NcclMessenger::be_broken(int peer, const Frame& frame) {
  Direction& direction = frame.from_sender != 0 ? peer_at(peer).in : peer_at(peer).out;
  direction.dead = std::max(direction.dead, frame.epoch);
  if (direction.channel && direction.epoch == frame.epoch)
    direction.channel->fail(broken_error(peer, frame.text), true);
}

std::exception_ptr NcclMessenger::broken_error(int peer, const std::string& why) const {
  return std::make_exception_ptr(Error(text("messages with rank ", peer, " have failed there: ", why)));
}

void NcclMessenger::tell_broken(int peer, bool from_sender, std::uint64_t epoch, const std::string& why) {
  Frame frame{.kind = FrameKind::broken, .from_sender = from_sender ? 1u : 0u, .epoch = epoch};
  std::strncpy(frame.text, why.c_str(), sizeof(frame.text) - 1);
  post(peer, frame);
}

// ---- ends ----

NcclMessenger::MessagePtr NcclMessenger::find_send(int peer, std::uint64_t id) const {
  const auto found = std::find_if(sends_.begin(), sends_.end(),
                                  [&](const MessagePtr& send) { return send->peer == peer && send->id == id; });
  return found == sends_.end() ? nullptr : *found;
}

/// The messages that no channel has.
std::vector<NcclMessenger::MessagePtr> NcclMessenger::waiting() const {
  std::vector<MessagePtr> all(sends_.begin(), sends_.end());
  matching_.each_posted([&](const MessagePtr& recv) { all.push_back(recv); });
  return all;
}

/// Of one of these.
void NcclMessenger::end(const MessagePtr& message, const std::exception_ptr& error) {
  if (message->is_send)
    sends_.remove(message);
  else
    matching_.remove(message);
  if (const auto completion = std::exchange(message->completion, nullptr)) completion->finish(error);
  changed_.notify_all();
}

void NcclMessenger::message_failed(NcclMessage& message, const std::exception_ptr& error) {
  failures_->add(message, error);
  const Lock lock(mutex_);
  if (message.is_eager) complain(message.peer, error);
  if (const auto completion = std::exchange(message.completion, nullptr)) completion->finish(error);
}

void NcclMessenger::channel_failed(NcclChannel& channel, const std::string& why, bool told) {
  const Lock lock(mutex_);
  const NcclChannel::Ends& ends = channel.ends();
  Direction& direction = ends.sends ? peer_at(ends.peer).out : peer_at(ends.peer).in;
  direction.dead = std::max(direction.dead, ends.epoch);
  if (direction.channel.get() == &channel) retire_channel(direction);
  if (!told) tell_broken(ends.peer, ends.sends, ends.epoch, why);
}

/// Its thread is joined elsewhere.
void NcclMessenger::retire_channel(Direction& direction) {
  if (direction.channel) broken_.push_back(std::move(direction.channel));
  direction.channel = nullptr;
}

/// From any rank: when one has died, or all have left.
std::exception_ptr NcclMessenger::lost(const NcclMessage& message) const {
  net::Loss worst{message.peer, net::Fate::alive};
  bool all = true;
  for (int rank = 0; rank < host_.world_size(); ++rank) {
    if (rank == host_.rank() || (message.peer >= 0 && rank != message.peer)) continue;
    const net::Fate fate = watched_->fate(rank);
    all &= fate != net::Fate::alive;
    if (fate != net::Fate::alive && worst.fate != net::Fate::died) worst = {rank, fate};
  }
  if (worst.fate != net::Fate::died && !all) return nullptr;
  return std::make_exception_ptr(
      PeerLost(worst.rank, text(net::describe(worst), "; ", describe(message), " cannot finish")));
}

/// Ends messages that cannot be matched any more.
void NcclMessenger::look_around() {
  std::vector<std::shared_ptr<NcclChannel>> joined;
  {
    const Lock lock(mutex_);
    if (closed_) return;
    const auto now = Clock::now();
    for (const MessagePtr& message : waiting()) look_at(message, now);
    joined = std::exchange(broken_, {});
  }
  for (const auto& channel : joined) channel->leave(0);
}

void NcclMessenger::look_at(const MessagePtr& message, Clock::time_point now) {
  if (const auto error = lost(*message)) return end(message, error);
  if (message->is_eager) return;  // it has ended for its caller, and waits as long as the receiver likes
  LateClock& clock = message->clock;
  if (clock.next() > now) return;
  if (is_suspended(message->peer)) return clock.start(now);
  if (clock.is_over(now)) {
    const auto error = std::make_exception_ptr(
        Timeout(text(describe(*message), " found no counterpart within ", times_.timeout_s, " s")));
    if (message->is_send) post(message->peer, {.kind = FrameKind::withdraw, .id = message->id});
    return end(message, error);
  }
  clock.set_warned();
  post_notice(text(describe(*message), ": rank ", host_.rank(), " has waited ", clock.waited_s(now),
                   " s; it has found no counterpart"));
}

void NcclMessenger::give_up(const Completion& completion) noexcept {
  const Lock lock(mutex_);
  const auto error = [](const NcclMessage& message) {
    return std::make_exception_ptr(Error(text(describe(message), " was given up (interrupted by a signal)")));
  };
  for (const MessagePtr& message : waiting()) {
    if (message->completion.get() != &completion) continue;
    if (message->is_send) post(message->peer, {.kind = FrameKind::withdraw, .id = message->id});
    return end(message, error(*message));
  }
  for (Peer& peer : peers_)
    for (const Direction* const direction : {&peer.out, &peer.in})
      if (direction->channel && direction->channel->has(completion))
        direction->channel->fail(std::make_exception_ptr(Error("a message was given up (interrupted by a signal)")),
                                 false);
}

void NcclMessenger::close() noexcept {
  give_up_->detach();
  const double patience_s = std::min(kLastMessages_s, times_.timeout_s / 2);
  std::vector<std::shared_ptr<NcclChannel>> channels;
  {
    Lock lock(mutex_);
    if (std::exchange(closing_, true)) return;
    changed_.wait_for(lock, std::chrono::duration<double>(patience_s), [this] {
      return std::none_of(sends_.begin(), sends_.end(), [](const MessagePtr& send) { return send->is_eager; });
    });
    closed_ = true;
    for (const MessagePtr& message : waiting())
      end(message,
          std::make_exception_ptr(Error(text("communicator was closed before ", describe(*message), " ended"))));
    for (Peer& peer : peers_)
      for (const Direction* const direction : {&peer.out, &peer.in})
        if (direction->channel) channels.push_back(direction->channel);
    channels.insert(channels.end(), broken_.begin(), broken_.end());
  }
  changed_.notify_all();
  for (const auto& channel : channels) channel->begin_leave(patience_s);  // all at the same time
  for (const auto& channel : channels) channel->leave(patience_s);
  liveness_->close();
  host_.close();
  if (reader_.joinable()) reader_.join();
}

}  // namespace zcomm::coll
