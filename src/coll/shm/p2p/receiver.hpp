// Receiver: the receiving half of one ordered pair of ranks. See [Note: rendezvous] in sender.hpp.
//
// Invariants: receives that wait for data are kept in the order in which their messages were answered. If dtype or
// count of message and receive differ, both sides end with the same CollectiveMismatch, and nothing else ends. Thread
// rule: under the messenger's lock.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "coll/shm/p2p/transfer.hpp"

namespace zcomm::coll {

class Receiver {
 public:
  Receiver(const ChannelMemory& memory, int peer, TransferPool& pool, ShmMatching& matching);

  /// A receive and a message that belong together.
  void accept(Transfer& receive, const MessageHeader& header, const std::byte* payload);
  /// Envelopes that may be wanted, answers, then at most one data slot. True if anything moved.
  bool progress();
  bool is_idle() const { return answers_.empty() && receiving_.empty(); }

  /// As Sender's.
  std::exception_ptr failure();
  /// Ends all matched receives. If there are any, also gives the channel up and writes the text to it.
  void fail(Breach::Cause cause, const std::string& what, const ErrorOf& error_of);
  template <class Function>
  void each(const Function& function) const {
    for (Transfer* receive : receiving_) function(*receive);
  }
  /// The messages that the peer has sent and no receive has asked for: "; rank 1 has sent: ...", or "".
  std::string unasked() const;

 private:
  bool take_envelopes();
  bool give_answers();
  bool take_data();

  struct PendingAnswer {
    std::uint32_t id;
    std::string mismatch;  // empty: send it
  };

  const ChannelMemory& memory_;
  int peer_;
  Channel& channel_;
  TransferPool& pool_;
  ShmMatching& matching_;
  std::vector<PendingAnswer> answers_;
  std::vector<Transfer*> receiving_;
  bool broken_ = false;
};

}  // namespace zcomm::coll
