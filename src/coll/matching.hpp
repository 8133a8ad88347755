// Matching: which receive a message belongs to. Shared by the messengers of shared memory and of links.
//
// Receives are kept in call order, messages that no receive has asked for yet in order of arrival; for each pair and
// tag, the first of one list matches the first of the other. A receive from any rank takes the first message of its
// tag. Matching knows only ranks and tags; the channel defines receives and messages, and how their bytes move. A
// message may still be arriving when it is kept: until it is complete it holds its turn, but matches no receive.
// Invariant: no posted receive matches a complete early message. Once warm, nothing is allocated. Thread rule: one
// thread at a time (the messenger's lock). Source: the posted and unexpected queues of MPI.
#pragma once

#include <algorithm>
#include <cstddef>
#include <list>
#include <optional>
#include <vector>

#include "coll/messenger.hpp"

namespace zcomm::coll {

/// `Receive`: a handle, cheap to copy and to compare. `Head`: the channel's description of a message.
template <class Receive, class Head>
class Matching {
 public:
  static constexpr int kAnyRank = -1;

  /// A message that arrived before its receive.
  struct Early {
    int peer, tag;
    Head head;
    std::vector<std::byte> payload;  ///< of a small one
    bool complete;
    std::size_t nbytes;  ///< in early_nbytes()
  };

  /// `payload_nbytes`: capacity reserved for the payload of an early message.
  explicit Matching(int world_size, std::size_t payload_nbytes = 0)
      : wanted_(static_cast<std::size_t>(world_size), 0),
        early_nbytes_(static_cast<std::size_t>(world_size), 0),
        payload_nbytes_(payload_nbytes) {
    posted_.reserve(kWarm);
  }

  /// The first early message for a receive; it is kept until drop(). Null if there is none: then the receive is posted.
  Early* find_early(int peer, int tag) {
    return first_early([&](const Early& m) { return m.complete && m.tag == tag && is_from(peer, m.peer); });
  }
  void drop(Early& message) {
    const auto at = std::find_if(early_.begin(), early_.end(), [&](const Early& m) { return &m == &message; });
    early_nbytes_[static_cast<std::size_t>(message.peer)] -= message.nbytes;
    spare_.splice(spare_.begin(), early_, at);
  }

  void post(Receive receive, int peer, int tag) {
    posted_.push_back({receive, peer, tag});
    count(peer, +1);
  }
  /// The first receive for a message of `peer`, no longer posted; none if no receive has asked for it.
  std::optional<Receive> match(int peer, int tag) {
    return take([&](const Posted& p) { return p.tag == tag && is_from(p.peer, peer); });
  }
  /// Keeps a message that no receive has asked for. Its payload is empty: the channel fills it. `nbytes`: counted until
  /// drop().
  Early& keep(int peer, int tag, const Head& head, bool complete, std::size_t nbytes = 0) {
    if (spare_.empty())
      for (std::size_t i = 0; i < kWarm; ++i) spare_.emplace_back().payload.reserve(payload_nbytes_);
    Early& message = spare_.front();
    message.peer = peer, message.tag = tag, message.head = head, message.complete = complete, message.nbytes = nbytes;
    early_nbytes_[static_cast<std::size_t>(peer)] += nbytes;
    message.payload.clear();
    early_.splice(early_.end(), spare_, spare_.begin());
    return message;
  }
  /// The last early message of `peer` that `is_it`, complete or not; null if there is none. The search starts at the
  /// newest message, however many wait before it.
  template <class IsIt>
  Early* find_kept(int peer, const IsIt& is_it) {
    const auto at =
        std::find_if(early_.rbegin(), early_.rend(), [&](const Early& m) { return m.peer == peer && is_it(m.head); });
    return at == early_.rend() ? nullptr : &*at;
  }
  /// The message is complete. Returns its receive, no longer posted, if one has asked for it meanwhile.
  std::optional<Receive> complete(Early& message) {
    message.complete = true;
    return match(message.peer, message.tag);
  }

  /// Withdraws a receive that will not continue; no effect on one that is not posted (any more).
  void remove(Receive receive) {
    take([&](const Posted& p) { return p.receive == receive; });
  }
  /// Withdraws the first receive that waits for `peer` and no other rank.
  std::optional<Receive> remove_first(int peer) {
    return take([&](const Posted& p) { return p.peer == peer; });
  }

  /// Whether a posted receive may get a message of `peer`.
  bool wants(int peer) const { return wanted_any_ > 0 || wanted_[static_cast<std::size_t>(peer)] > 0; }
  /// Bytes of early messages of `peer`.
  std::size_t early_nbytes(int peer) const { return early_nbytes_[static_cast<std::size_t>(peer)]; }
  template <class Function>
  void each_posted(const Function& function) const {
    for (const Posted& posted : posted_) function(posted.receive);
  }
  const std::list<Early>& early() const { return early_; }

 private:
  struct Posted {
    Receive receive;
    int peer, tag;
  };

  static bool is_from(int wanted, int peer) { return wanted == kAnyRank || wanted == peer; }
  void count(int peer, int by) { (peer == kAnyRank ? wanted_any_ : wanted_[static_cast<std::size_t>(peer)]) += by; }
  template <class IsIt>
  Early* first_early(const IsIt& is_it) {
    const auto at = std::find_if(early_.begin(), early_.end(), is_it);
    return at == early_.end() ? nullptr : &*at;
  }
  template <class IsIt>
  std::optional<Receive> take(const IsIt& is_it) {
    const auto at = std::find_if(posted_.begin(), posted_.end(), is_it);
    if (at == posted_.end()) return std::nullopt;
    const Receive receive = at->receive;
    count(at->peer, -1);
    posted_.erase(at);
    return receive;
  }

  std::vector<Posted> posted_;
  std::vector<int> wanted_;  // posted receives by source
  int wanted_any_ = 0;
  std::vector<std::size_t> early_nbytes_;  // by source
  const std::size_t payload_nbytes_;
  std::list<Early> early_, spare_;  // spare nodes keep their payload's memory
};

}  // namespace zcomm::coll
