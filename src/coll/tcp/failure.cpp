// See failure.hpp.
#include "coll/tcp/failure.hpp"

#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {

bool LinkFate::set(Verdict verdict) {
  const std::lock_guard lock(mutex_);
  if (is_set()) return false;
  verdict_ = std::move(verdict);
  is_set_.store(true, std::memory_order_release);
  net::signal_event(event_);
  return true;
}

Verdict LinkFate::verdict() const {
  const std::lock_guard lock(mutex_);
  return verdict_;
}

void LinkFate::throw_if_set(const std::string& during) const {
  if (!is_set()) return;
  const Verdict verdict = this->verdict();
  const std::string doing = during.empty() ? "" : text("; ", during, " cannot finish");
  switch (verdict.cause) {
    case Verdict::Cause::none:
      return;
    case Verdict::Cause::died:
      throw PeerLost(verdict.culprit, text("rank ", verdict.culprit, " died", doing));
    case Verdict::Cause::left:
      throw PeerLost(verdict.culprit,
                     text("rank ", verdict.culprit,
                          " left (closed its communicator or said goodbye) while others needed it", doing));
    case Verdict::Cause::late:
      throw Timeout(verdict.story);
    case Verdict::Cause::mismatch:
      throw CollectiveMismatch(verdict.story);
    case Verdict::Cause::failed:
      throw Error(text("rank ", verdict.culprit, " failed: ", verdict.story));
  }
}

}  // namespace zcomm::coll
