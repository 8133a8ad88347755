// LateClock: how long one wait for other ranks has lasted, when the late ones are reported, and when it ends.
//
// [Note: signs of life] With limit_s above timeout_s, a rank that shows life at the deadline gets another timeout_s,
// but no wait lasts longer than limit_s. So ranks wait for a rank that computes, but not for one that is stopped or cut
// off, and ranks that wait for each other do not hang. Otherwise timeout_s is exact. Signs of life are checked by
// Liveness and MessageProgress (its process, shown by the kernel), TcpSockets and TcpMessenger (its control thread
// answers). Thread rule: none of its own.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>

#include "coll/signal.hpp"

namespace zcomm::coll {

struct WaitTimes {
  double timeout_s = 600.0;
  double limit_s = 0.0;
  double warn_s = 60.0;

  double longest_s() const { return std::max(timeout_s, limit_s); }
};

/// From CommOptions and similar types.
template <class Options>
WaitTimes times_of(const Options& options) {
  return {options.timeout_s, options.limit_s, options.warn_s};
}

class LateClock {
 public:
  explicit LateClock(const WaitTimes& times = {})
      : times_(times), timeout_(span(times.timeout_s)), limit_(span(times.longest_s())), warning_(span(times.warn_s)) {}

  void start(Clock::time_point now) {
    since_ = now;
    deadline_ = now + timeout_;
    has_warned_ = is_extended_ = false;
  }
  Clock::time_point deadline() const { return deadline_; }
  /// When to look at it again.
  Clock::time_point next() const { return has_warned_ ? deadline_ : std::min(deadline_, since_ + warning_); }
  /// With signs of life, not before the warning: a thread that had no CPU may look after both times.
  bool is_over(Clock::time_point now) const { return now >= deadline_ && (is_exact() || !is_warning_due(now)); }
  /// The late ranks show life: extends the wait, unless the limit is reached. True if it was extended.
  bool extend(Clock::time_point now) {
    if (now >= since_ + limit_) return false;
    deadline_ = std::min(now + timeout_, since_ + limit_);
    return is_extended_ = true;
  }
  /// Whether timeout_s is exact, whatever the late ranks do.
  bool is_exact() const { return limit_ <= timeout_; }
  bool is_warning_due(Clock::time_point now) const { return !has_warned_ && now >= since_ + warning_; }
  void set_warned() { has_warned_ = true; }
  bool has_warned() const { return has_warned_; }
  /// Seconds, for messages: the promised ones at a plain deadline.
  double waited_s(Clock::time_point now) const {
    if (is_over(now) && !is_extended_) return times_.timeout_s;
    const double waited = std::chrono::duration<double>(now - since_).count();
    return waited < 10 ? std::round(waited * 10) / 10 : std::round(waited);
  }
  const WaitTimes& times() const { return times_; }

 private:
  static Clock::duration span(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e9)));
  }

  WaitTimes times_;
  Clock::duration timeout_, limit_, warning_;
  Clock::time_point since_{}, deadline_{};
  bool has_warned_ = false, is_extended_ = false;
};

}  // namespace zcomm::coll
