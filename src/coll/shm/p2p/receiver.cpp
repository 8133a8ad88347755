// Receiving from one rank (coll/shm/p2p/receiver.hpp).
#include "coll/shm/p2p/receiver.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "coll/shm/p2p/sender.hpp"

namespace zcomm::coll {

Receiver::Receiver(const ChannelMemory& memory, int peer, TransferPool& pool, ShmMatching& matching)
    : memory_(memory), peer_(peer), channel_(memory.channel(peer, memory.rank())), pool_(pool), matching_(matching) {
  answers_.reserve(kWarm);
  receiving_.reserve(kWarm);
}

void Receiver::accept(Transfer& receive, const MessageHeader& header, const std::byte* payload) {
  if (!receive.header.same_elements(header)) {
    std::string what = text("a message differs from its receive: rank ", peer_, ": ",
                            describe(header, true, memory_.rank()), "; rank ", memory_.rank(), ": ", describe(receive));
    pool_.finish(receive, std::make_exception_ptr(CollectiveMismatch(what)));
    answers_.push_back({header.id, std::move(what)});
    return;
  }
  if (receive.source != nullptr) *receive.source = peer_;
  receive.peer = peer_;
  if (is_inline(header)) {
    receive.copy_from(payload, receive.nbytes);
    pool_.finish(receive);
    return;
  }
  receive.stage = Transfer::Stage::receiving;
  receive.got_on(Clock::now());
  receiving_.push_back(&receive);
  answers_.push_back({header.id, {}});
}

bool Receiver::progress() {
  if (broken_) return false;
  const bool met = take_envelopes();
  const bool answered = give_answers();
  return take_data() || met || answered;
}

bool Receiver::take_envelopes() {
  bool moved = false;
  for (; matching_.wants(peer_) && channel_.envelopes.available(); moved = true) {
    const Envelope& envelope =
        channel_.envelope[channel_.envelopes.read.load(std::memory_order_relaxed) % Channel::kEnvelopes];
    const MessageHeader& header = envelope.header;
    if (const auto receive = matching_.match(peer_, header.tag)) {
      accept(**receive, header, envelope.payload);
    } else {
      auto& early = matching_.keep(peer_, header.tag, header, /*complete=*/true);
      if (is_inline(header)) early.payload.assign(envelope.payload, envelope.payload + header.nbytes());
    }
    if (channel_.envelopes.release()) memory_.ring(peer_);
  }
  return moved;
}

bool Receiver::give_answers() {
  bool moved = false;
  while (!answers_.empty() && channel_.answers.claim(Channel::kAnswers)) {
    const PendingAnswer& pending = answers_.front();
    Answer& answer = channel_.answer[channel_.answers.written.load(std::memory_order_relaxed) % Channel::kAnswers];
    answer.id = pending.id;
    const std::size_t length = std::min(pending.mismatch.size(), sizeof(answer.mismatch) - 1);
    std::memcpy(answer.mismatch, pending.mismatch.data(), length);
    answer.mismatch[length] = '\0';
    channel_.answers.commit();
    answers_.erase(answers_.begin());
    moved = true;
  }
  if (moved) memory_.ring(peer_);
  return moved;
}

bool Receiver::take_data() {
  if (receiving_.empty() || !channel_.slots.available()) return false;
  Transfer& receive = *receiving_.front();
  const std::uint32_t position = channel_.slots.read.load(std::memory_order_relaxed);
  receive.copy_from(memory_.slot(channel_, position), std::min(receive.left(), memory_.slot_nbytes()));
  if (channel_.slots.release()) memory_.ring(peer_);
  if (receive.left() == 0) {
    receiving_.erase(receiving_.begin());
    pool_.finish(receive);
  }
  for (const auto now = Clock::now(); Transfer * waiting : receiving_) waiting->got_on(now);
  return true;
}

std::exception_ptr Receiver::failure() {
  for (Breach* breach : {&channel_.by_receiver, &channel_.by_sender}) {
    const auto cause = static_cast<Breach::Cause>(breach->cause.load(std::memory_order_acquire));
    if (cause == Breach::none) continue;
    return make_error(
        cause, text("rank ", memory_.rank(), " can receive nothing more from rank ", peer_, " since: ", breach->what));
  }
  return nullptr;
}

void Receiver::fail(Breach::Cause cause, const std::string& what, const ErrorOf& error_of) {
  if (receiving_.empty()) return;
  broken_ = true;
  declare(channel_.by_receiver, cause, what);
  memory_.ring(peer_);
  for (Transfer* receive : receiving_) pool_.finish(*receive, error_of(*receive));
  receiving_.clear();
}

std::string Receiver::unasked() const {
  constexpr int kShown = 3;
  std::string all;
  int seen = 0;
  const auto add = [&](const MessageHeader& header) {
    if (++seen <= kShown) all += text(seen == 1 ? "" : ", ", describe(header, true, memory_.rank()));
  };
  for (const auto& message : matching_.early())
    if (message.peer == peer_) add(message.head);
  const std::uint32_t end = channel_.envelopes.written.load(std::memory_order_acquire);
  for (std::uint32_t i = channel_.envelopes.read.load(std::memory_order_relaxed); i != end; ++i)
    add(channel_.envelope[i % Channel::kEnvelopes].header);
  if (seen == 0) return "";
  if (seen > kShown) all += text(", and ", seen - kShown, " more");
  return text("; rank ", peer_, " has sent messages without a receive on this rank: ", all);
}

}  // namespace zcomm::coll
