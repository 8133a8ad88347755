// Sending to one rank (coll/shm/p2p/sender.hpp).
#include "coll/shm/p2p/sender.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {

std::exception_ptr make_error(Breach::Cause cause, const std::string& what) {
  return cause == Breach::late ? std::make_exception_ptr(Timeout(what)) : std::make_exception_ptr(Error(what));
}

void declare(Breach& breach, Breach::Cause cause, const std::string& what) {
  if (cause == Breach::none || breach.cause.load(std::memory_order_relaxed) != Breach::none) return;
  std::strncpy(breach.what, what.c_str(), sizeof(breach.what) - 1);
  breach.cause.store(cause, std::memory_order_release);
}

Sender::Sender(const ChannelMemory& memory, int peer, TransferPool& pool)
    : memory_(memory), peer_(peer), channel_(memory.channel(memory.rank(), peer)), pool_(pool) {
  for (auto* list : {&queued_, &announced_, &sending_}) list->reserve(kWarm);
}

void Sender::post(Transfer& send) {
  was_used_ = true;
  queued_.push_back(&send);
}

bool Sender::progress() {
  if (!was_used_ || broken_) return false;
  const bool answered = take_answers();
  const bool announced = announce();
  return send_data() || answered || announced;
}

bool Sender::take_answers() {
  bool moved = false;
  for (; channel_.answers.available(); moved = true) {
    const Answer& answer = channel_.answer[channel_.answers.read.load(std::memory_order_relaxed) % Channel::kAnswers];
    const auto place = std::find_if(announced_.begin(), announced_.end(),
                                    [&](const Transfer* t) { return t->header.id == answer.id; });
    if (place == announced_.end()) {
      late_mismatch_ = answer.mismatch;
    } else {
      Transfer& send = **place;
      announced_.erase(place);
      if (answer.mismatch[0] != '\0') {
        pool_.finish(send, std::make_exception_ptr(CollectiveMismatch(answer.mismatch)));
      } else {
        send.stage = Transfer::Stage::sending;
        send.got_on(Clock::now());
        sending_.push_back(&send);
      }
    }
    if (channel_.answers.release()) memory_.ring(peer_);
  }
  return moved;
}

bool Sender::announce() {
  bool moved = false;
  while (!queued_.empty() && channel_.envelopes.claim(Channel::kEnvelopes)) {
    Transfer& send = *queued_.front();
    queued_.erase(queued_.begin());
    send.header.id = channel_.envelopes.written.load(std::memory_order_relaxed);
    Envelope& envelope = channel_.envelope[send.header.id % Channel::kEnvelopes];
    envelope.header = send.header;
    const bool small = is_inline(send.header);
    if (small) send.copy_to(envelope.payload, send.nbytes, writer_);
    channel_.envelopes.commit();
    if (small) {
      pool_.finish(send);
    } else {
      send.stage = Transfer::Stage::announced;
      announced_.push_back(&send);
    }
    moved = true;
  }
  if (!moved) return false;
  memory_.ring(peer_);
  for (const auto now = Clock::now(); Transfer * waiting : queued_) waiting->got_on(now);
  return true;
}

bool Sender::send_data() {
  if (sending_.empty() || !channel_.slots.claim(memory_.slot_count())) return false;
  Transfer& send = *sending_.front();
  const std::uint32_t position = channel_.slots.written.load(std::memory_order_relaxed);
  send.copy_to(memory_.slot(channel_, position), std::min(send.left(), memory_.slot_nbytes()), writer_);
  channel_.slots.commit();
  memory_.ring(peer_);
  if (send.left() == 0) {
    sending_.erase(sending_.begin());
    pool_.finish(send);
  }
  for (const auto now = Clock::now(); Transfer * waiting : sending_) waiting->got_on(now);
  return true;
}

std::exception_ptr Sender::failure() {
  for (Breach* breach : {&channel_.by_sender, &channel_.by_receiver}) {
    const auto cause = static_cast<Breach::Cause>(breach->cause.load(std::memory_order_acquire));
    if (cause == Breach::none) continue;
    return make_error(
        cause, text("rank ", memory_.rank(), " can send nothing more to rank ", peer_, " since: ", breach->what));
  }
  return nullptr;
}

void Sender::remove(Transfer& send) { queued_.erase(std::find(queued_.begin(), queued_.end(), &send)); }

void Sender::fail(Breach::Cause cause, const std::string& what, const ErrorOf& error_of) {
  if (!announced_.empty() || !sending_.empty()) {
    broken_ = true;
    declare(channel_.by_sender, cause, what);
    memory_.ring(peer_);
  }
  for (auto* list : {&queued_, &announced_, &sending_}) {
    for (Transfer* send : *list) pool_.finish(*send, error_of(*send));
    list->clear();
  }
}

}  // namespace zcomm::coll
