// See failure.hpp.
#include "coll/tcp/failure.hpp"

#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {

bool TcpFailure::set(FailureReport report) {
  const std::lock_guard lock(mutex_);
  if (is_set()) return false;
  report_ = std::move(report);
  is_set_.store(true, std::memory_order_release);
  net::signal_event(event_);
  return true;
}

FailureReport TcpFailure::report() const {
  const std::lock_guard lock(mutex_);
  return report_;
}

void TcpFailure::throw_if_set(const std::string& during) const {
  if (!is_set()) return;
  const FailureReport report = this->report();
  const std::string doing = during.empty() ? "" : text("; ", during, " cannot finish");
  switch (report.cause) {
    case FailureReport::Cause::none:
      return;
    case FailureReport::Cause::died:
      throw PeerLost(report.rank, text("rank ", report.rank, " died", doing));
    case FailureReport::Cause::left:
      throw PeerLost(
          report.rank,
          text("rank ", report.rank, " left (closed its communicator or said goodbye) while others needed it", doing));
    case FailureReport::Cause::late:
      throw Timeout(report.message);
    case FailureReport::Cause::mismatch:
      throw CollectiveMismatch(report.message);
    case FailureReport::Cause::failed:
      throw Error(text("rank ", report.rank, " failed: ", report.message));
  }
}

}  // namespace zcomm::coll
