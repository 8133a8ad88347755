// Sender: the sending half of one ordered pair of ranks.
//
// [Note: rendezvous] A send becomes an envelope as soon as there is room, in call order. A small one is over with that:
// its data lie in the envelope. A large one waits until the receiver has matched it and answered; then its data go
// through the channel's slots. Data of several messages go one after the other in the order of the answers, in which
// the receiver expects them. So a message without a receive holds up no other: it is an envelope, no more.
// Invariants: a send is in exactly one of the lists, as its stage says. Once the channel is given up (a message ended
// in the middle, so that the two sides would no longer agree on what lies in the slots) each send throws that error.
// Thread rule: under the messenger's lock.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "coll/shm/p2p/transfer.hpp"

namespace zcomm::coll {

class Sender {
 public:
  Sender(const ChannelMemory& memory, int peer, TransferPool& pool);

  void post(Transfer& send);
  /// Answers, envelopes, then at most one data slot. True if anything moved.
  bool progress();
  bool is_idle() const { return queued_.empty() && announced_.empty() && sending_.empty(); }

  /// A small message has ended long before the receiver found that it was not what it expected: what it said, once.
  std::string take_late_mismatch() { return std::exchange(late_mismatch_, {}); }
  bool has_late_mismatch() const { return !late_mismatch_.empty(); }

  /// Error of each new send since the channel was given up here or there; null while all is well.
  std::exception_ptr failure();
  /// Takes back a send that was not announced to the receiver.
  void remove(Transfer& send);
  /// Ends all sends, and gives the channel up (saying `what`) if one of them was announced to the receiver.
  /// Breach::none: without a word, as the receiver is gone or sees that this rank is.
  void fail(Breach::Cause cause, const std::string& what, const ErrorOf& error_of);
  template <class Function>
  void each(const Function& function) const {
    for (const auto* list : {&queued_, &announced_, &sending_})
      for (Transfer* send : *list) function(*send);
  }
  bool was_used() const { return was_used_; }

 private:
  bool take_answers();
  bool announce();
  bool send_data();

  const ChannelMemory& memory_;
  int peer_;
  Channel& channel_;
  TransferPool& pool_;
  AdaptiveStore writer_;
  std::vector<Transfer*> queued_, announced_, sending_;
  std::string late_mismatch_;
  bool broken_ = false, was_used_ = false;
};

/// The error type of a cause, with its text.
std::exception_ptr make_error(Breach::Cause cause, const std::string& what);
/// Shows `what` to the other side; the first word counts.
void declare(Breach& breach, Breach::Cause cause, const std::string& what);

}  // namespace zcomm::coll
