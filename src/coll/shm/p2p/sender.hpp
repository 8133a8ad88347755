// Sender: the sending half of one ordered pair of ranks.
//
// [Note: rendezvous] A send becomes an envelope as soon as there is room, in call order. A small one then ends, because
// its data lie in the envelope. A large one waits until the receiver has matched it and answered; then its data go
// through the channel's slots. Data of several messages follow one another in the order of the answers, in which the
// receiver expects them. So a message without a receive blocks no other: it takes only an envelope. Invariants: a send
// is in exactly one of the lists, as its stage says. Once the channel is given up (a message ended in the middle, so
// the two sides would no longer agree on the contents of the slots), each send throws that error. Thread rule: under
// the messenger's lock.
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

  /// The receiver's mismatch report for a small message, which had ended long before; returned once.
  std::string take_late_mismatch() { return std::exchange(late_mismatch_, {}); }
  bool has_late_mismatch() const { return !late_mismatch_.empty(); }

  /// The error of each new send since either side gave the channel up; null while it is intact.
  std::exception_ptr failure();
  /// Takes back a send that was not announced to the receiver.
  void remove(Transfer& send);
  /// Ends all sends. If one was announced to the receiver, also gives the channel up and writes the text to it.
  /// Breach::none: without a text, because the receiver has ended or sees that this rank has.
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
/// Shows the text to the other side; the first one counts.
void declare(Breach& breach, Breach::Cause cause, const std::string& what);

}  // namespace zcomm::coll
