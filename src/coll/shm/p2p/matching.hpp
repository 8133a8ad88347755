// Matching: which receive a message belongs to.
//
// Receives are kept in call order, messages that no receive has asked for yet in order of arrival; of each pair
// and tag the first of one goes to the first of the other. Messages are only taken from a channel while a receive waits
// for one of that rank (wants()), so that a receiver that asks for nothing keeps its senders waiting, and not its
// memory. Invariant: no posted receive matches a message in the stash. Thread rule: under the messenger's lock.
#pragma once

#include <functional>
#include <list>
#include <vector>

#include "coll/shm/p2p/transfer.hpp"

namespace zcomm::coll {

/// A message that came before it was asked for.
struct EarlyMessage {
  int peer;
  MessageHeader header;
  std::vector<std::byte> payload;  ///< of a small one
};

class Matching {
 public:
  explicit Matching(int world_size) : wanted_(static_cast<std::size_t>(world_size), 0) { posted_.reserve(kWarm); }

  /// The first early message for `receive`, which must be given back; null if there is none.
  EarlyMessage* find_early(const Transfer& receive);
  void drop_early(EarlyMessage& message);

  /// Keeps a receive that found no early message.
  void post(Transfer& receive);
  /// The first receive for a message of `peer`, no longer posted; null if no receive has asked for it.
  Transfer* match(int peer, const MessageHeader& header);
  void keep_early(int peer, const Envelope& envelope);
  /// Takes a receive back that will not go on.
  void remove(Transfer& receive);

  /// Whether a posted receive may get a message of `peer`.
  bool wants(int peer) const { return wanted_any_ > 0 || wanted_[static_cast<std::size_t>(peer)] > 0; }
  const std::vector<Transfer*>& posted() const { return posted_; }
  const std::list<EarlyMessage>& early() const { return early_; }

 private:
  void count(const Transfer& receive, int by);

  std::vector<Transfer*> posted_;
  std::vector<int> wanted_;  // posted receives by source
  int wanted_any_ = 0;
  std::list<EarlyMessage> early_, spare_;  // spare nodes keep their payload's memory
};

}  // namespace zcomm::coll
