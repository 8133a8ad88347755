// See failure.hpp.
#include "coll/tcp/failure.hpp"

#include <utility>

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
  net::throw_cause(report.cause, report.rank, report.message, during);
}

}  // namespace zcomm::coll
