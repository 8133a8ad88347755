// Messages and receives find each other (coll/shm/p2p/matching.hpp).
#include "coll/shm/p2p/matching.hpp"

#include <algorithm>

namespace zcomm::coll {
namespace {

bool matches(const Transfer& receive, int peer, const MessageHeader& header) {
  return receive.header.tag == header.tag && (receive.peer == -1 || receive.peer == peer);
}

}  // namespace

EarlyMessage* Matching::find_early(const Transfer& receive) {
  const auto found = std::find_if(early_.begin(), early_.end(),
                                  [&](const EarlyMessage& m) { return matches(receive, m.peer, m.header); });
  return found == early_.end() ? nullptr : &*found;
}

void Matching::drop_early(EarlyMessage& message) {
  const auto place = std::find_if(early_.begin(), early_.end(), [&](const EarlyMessage& m) { return &m == &message; });
  spare_.splice(spare_.begin(), early_, place);
}

void Matching::post(Transfer& receive) {
  posted_.push_back(&receive);
  count(receive, +1);
}

Transfer* Matching::match(int peer, const MessageHeader& header) {
  const auto found =
      std::find_if(posted_.begin(), posted_.end(), [&](const Transfer* t) { return matches(*t, peer, header); });
  if (found == posted_.end()) return nullptr;
  Transfer* const receive = *found;
  remove(*receive);
  return receive;
}

void Matching::keep_early(int peer, const Envelope& envelope) {
  if (spare_.empty())
    for (std::size_t i = 0; i < kWarm; ++i) spare_.emplace_back().payload.reserve(Envelope::kInlineNbytes);
  EarlyMessage& message = spare_.front();
  message.peer = peer;
  message.header = envelope.header;
  message.payload.clear();
  if (is_inline(envelope.header)) message.payload.assign(envelope.payload, envelope.payload + envelope.header.nbytes());
  early_.splice(early_.end(), spare_, spare_.begin());
}

void Matching::remove(Transfer& receive) {
  posted_.erase(std::find(posted_.begin(), posted_.end(), &receive));
  count(receive, -1);
}

void Matching::count(const Transfer& receive, int by) {
  (receive.peer < 0 ? wanted_any_ : wanted_[static_cast<std::size_t>(receive.peer)]) += by;
}

}  // namespace zcomm::coll
