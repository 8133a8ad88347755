// Rounds behind the calls (coll/cuda/trailing_guard.hpp).
#include "coll/cuda/trailing_guard.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "base/notices.hpp"
#include "coll/failure.hpp"

namespace zcomm::coll {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kGrace{0.5}, kLongGrace{2};  // for calls in which a rank that has died, or left, has done its part
constexpr std::chrono::milliseconds kSlice{50};
constexpr std::uint64_t kOften = CallLog::kRoom / 4;  // calls after which ranks meet, however soon

std::string list(const std::vector<int>& ranks) {
  std::string joined;
  for (const int rank : ranks) joined += text(joined.empty() ? "" : ", ", rank);
  return joined;
}

}  // namespace

TrailingGuard::TrailingGuard(Communicator& rounds, std::shared_ptr<net::Mesh> watched, const WaitTimes& times,
                             double period_s)
    : rounds_(rounds),
      watched_(std::move(watched)),
      rank_(rounds.rank()),
      world_size_(rounds.world_size()),
      times_(times),
      period_(std::min(period_s, times.longest_s() / 4)),
      last_(static_cast<std::size_t>(rounds.world_size())) {}

void TrailingGuard::start(Guarded& guarded) {
  guarded_ = &guarded;
  thread_ = std::thread([this] { loop(); });
}

void TrailingGuard::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    rounds_.close();
    thread_.join();
  }
  const std::lock_guard lock(mutex_);
  for (Pending& each : pending_) each = {};  // a ticket's liveness shares this guard
}

// ---- calls ----

void TrailingGuard::begin(Operation& operation, std::shared_ptr<Ticket> ticket) {
  Lock lock(mutex_);
  if (failed_) raise(describe(operation.signature));
  if (lost_ || watched_->lost()) raise_lost(describe(operation.signature));
  if (log_.count() - verified_ >= CallLog::kRoom - 1)
    wait_verified(lock, log_.count() - (CallLog::kRoom - 2), describe(operation.signature));
  if (ended_ == log_.count()) oldest_since_ = Clock::now();
  log_.add(operation);
  const Stage stage = ticket ? Stage::launching : Stage::on_host;
  if (ticket) ticket->signature = operation.signature;
  pending(log_.count()) = {std::move(ticket), stage};
  if (log_.count() % kOften != 0) return;
  wanted_rounds_ = 2;
  changed_.notify_all();
}

void TrailingGuard::set_stage(Stage stage) {
  const std::lock_guard lock(mutex_);
  if (stage == Stage::launching && ended_ + 1 == log_.count()) oldest_since_ = Clock::now();
  pending(log_.count()).stage = stage;
}

/// Counts the calls that have ended. Throws CudaError.
void TrailingGuard::advance() {
  for (; ended_ < log_.count(); ++ended_, oldest_since_ = Clock::now()) {
    Pending& next = pending(ended_ + 1);
    if (next.stage != Stage::over && (next.stage != Stage::on_stream || !next.ticket->end().done())) return;
    next = {};
  }
}

void TrailingGuard::verify(bool behind) {
  Lock lock(mutex_);
  if (failed_) raise("verify");
  const std::uint64_t target = behind ? marked_ : log_.count();
  marked_ = log_.count();
  wanted_rounds_ = 2;
  changed_.notify_all();
  wait_verified(lock, target, "verify");
}

void TrailingGuard::wait_verified(Lock& lock, std::uint64_t target, const std::string& during) {
  if (verified_ >= target) return;
  struct Waiting {
    int& count;
    explicit Waiting(int& of) : count(of) { ++count; }
    ~Waiting() { --count; }
  } const waiting(waiting_);
  changed_.notify_all();
  for (auto start = Clock::now(); verified_ < target;) {
    if (failed_) raise(during);
    raise_lost(during);
    if (stopping_) throw Error(text("communicator was closed while ", during, " waited"));
    changed_.wait_for(lock, kSlice);
    lock.unlock();
    try {
      check_interrupt();
    } catch (...) {
      lock.lock();
      throw;
    }
    lock.lock();
    if (suspended_ || any_suspended_) start = Clock::now();
    if (Clock::now() - start < Seconds(times_.longest_s()) || verified_ >= target) continue;
    throw Timeout(text(during, ": ", lateness(target, last_)));
  }
}

void TrailingGuard::leave(double patience_s) noexcept {
  const std::lock_guard lock(mutex_);
  if (std::exchange(leaving_, true)) return;
  leaving_until_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(patience_s));
  wanted_rounds_ = 2;
  changed_.notify_all();
}

bool TrailingGuard::settle() noexcept {
  Lock lock(mutex_);
  bool is_broken = false;
  const auto has_ended = [&] {
    try {
      advance();
    } catch (...) {  // the device is lost
      is_broken = true;
    }
    return !is_broken && ended_ == log_.count();
  };
  ++waiting_;
  while (!is_over_ && Clock::now() < leaving_until_) {
    if (!failed_ && has_ended() && (lost_ || verified_ == log_.count())) break;
    changed_.wait_for(lock, std::chrono::milliseconds(2));
  }
  --waiting_;
  if (failed_) return false;
  if (has_ended()) return true;
  const std::string closed = text("communicator was closed while ", describe(log_[ended_ + 1].signature), " was ",
                                  is_broken ? "on a lost device" : "on the device");
  lock.unlock();
  fail(std::make_exception_ptr(Error(closed)), true);
  return false;
}

void TrailingGuard::suspend_deadline(bool suspended) {
  const std::lock_guard lock(mutex_);
  suspended_ = suspended;
}

// ---- failures ----

TrailingGuard::Failed TrailingGuard::failed_by(const std::exception_ptr& error) const noexcept {
  using net::Cause;
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& e) {
    return {error, net::cause_of(watched_->fate(e.rank)), e.rank, e.what()};
  } catch (const Timeout& e) {
    return {error, Cause::late, rank_, e.what()};
  } catch (const CollectiveMismatch& e) {
    return {error, Cause::mismatch, rank_, e.what()};
  } catch (const Interrupted& e) {
    return {error, Cause::left, rank_, e.what()};
  } catch (const std::exception& e) {
    return {error, Cause::failed, rank_, e.what()};
  } catch (...) {
    return {error, Cause::failed, rank_, "an unknown error"};
  }
}

void TrailingGuard::set_failed(Failed failed) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  try {
    advance();
  } catch (...) {  // the device is lost
  }
  failed.good = differs_ == 0 ? ended_ : std::min(ended_, differs_ - 1);
  failed_ = std::move(failed);
  changed_.notify_all();
}

void TrailingGuard::fail(const std::exception_ptr& error, bool leaves) noexcept {
  Failed failed = failed_by(error);
  if (leaves) failed.cause = net::Cause::left, failed.rank = rank_;
  set_failed(std::move(failed));
}

bool TrailingGuard::has_failed() const {
  const std::lock_guard lock(mutex_);
  return failed_.has_value();
}

void TrailingGuard::raise(const std::string& during) const {
  is_reported_ = true;
  if (failed_->own) std::rethrow_exception(failed_->own);
  net::throw_cause(failed_->cause, failed_->rank, failed_->message, during);
}

/// For a new call: repeats the failure if the program has seen it.
void TrailingGuard::raise_again(const std::string& during) const {
  if (!is_reported_) raise(during);
  try {
    raise(during);
  } catch (...) {
    std::rethrow_exception(repeated(std::current_exception()));
  }
}

/// For calls that a rank which has died, or left, does not make.
void TrailingGuard::raise_lost(const std::string& during) const {
  const auto lost = lost_ ? lost_ : watched_->lost();
  if (!lost || (!lost_ && lost->fate != net::Fate::died)) return;
  net::throw_cause(net::cause_of(lost->fate), lost->rank, "", during);
}

bool TrailingGuard::will_fail() {
  Lock lock(mutex_);
  return changed_.wait_for(lock, kGrace + 2 * period_, [this] { return failed_ || is_over_; }) && failed_;
}

std::string TrailingGuard::unreported() const {
  const std::lock_guard lock(mutex_);
  return failed_ && failed_->cause == net::Cause::mismatch && !is_reported_ ? failed_->message : "";
}

void TrailingGuard::throw_again_if_failed(const Signature& during) const {
  const std::lock_guard lock(mutex_);
  if (failed_) raise_again(describe(during));
}

void TrailingGuard::throw_if_failed(const Signature& during) const {
  const std::lock_guard lock(mutex_);
  if (failed_) raise(describe(during));
}

void TrailingGuard::throw_if_spoiled(const Signature& during) const {
  const std::lock_guard lock(mutex_);
  if (failed_ && static_cast<std::int32_t>(during.sequence - static_cast<std::uint32_t>(failed_->good)) > 0)
    raise(describe(during));
}

// ---- rounds ----

template <class Type>
std::vector<Type> TrailingGuard::exchange(const Type* mine, std::size_t count) {
  static_assert(std::is_trivially_copyable_v<Type>);
  std::vector<Type> all(count * static_cast<std::size_t>(world_size_));
  const ConstBuffer from{mine, count * sizeof(Type)};
  const Buffer to{all.data(), all.size() * sizeof(Type)};
  rounds_.all_gather({&from, 1}, {&to, 1}, DType::uint8, Call("guard", false));
  return all;
}

void TrailingGuard::loop() noexcept {
  try {
    do {
      Lock lock(mutex_);
      changed_.wait_for(lock, period_, [this] { return stopping_ || failed_ || wanted_rounds_ > 0 || waiting_ > 0; });
      if (stopping_) break;
      if (wanted_rounds_ > 0) --wanted_rounds_;
    } while (round());
  } catch (const PeerLost& error) {
    outlive(error.rank);
  } catch (...) {
    if (!is_stopping()) fail(std::current_exception());  // no round can tell it
  }
  if (has_failed() && !is_stopping()) guarded_->stop();
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  changed_.notify_all();
}

bool TrailingGuard::is_stopping() const {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

/// False after the last round. Throws the errors of the exchange.
bool TrailingGuard::round() {
  Record mine;
  try {
    look();
    mine = record();
  } catch (...) {
    fail(std::current_exception());
    mine.has_failed = true;
  }
  const std::vector<Record> records = exchange(&mine);
  if (std::any_of(records.begin(), records.end(), [](const Record& r) { return r.has_failed; })) {
    tell();
    return false;
  }
  try {
    compare(records);
  } catch (const CollectiveMismatch&) {  // found by all
    fail(std::current_exception());
    return false;
  }
  try {
    try {
      judge_lateness(records);
    } catch (const Timeout&) {
      if (is_missing_) raise_missing();
      throw;
    }
  } catch (...) {
    fail(std::current_exception());  // told in the next round
  }
  return true;
}

/// The library's health. Throws its errors, with the call that they end.
bool TrailingGuard::is_healthy() {
  try {
    return guarded_->look();
  } catch (const CudaError& error) {
    throw CudaError(oldest() + error.what());
  }
}

std::string TrailingGuard::oldest() const {
  const std::lock_guard lock(mutex_);
  return ended_ == log_.count() ? "" : text(describe(log_[ended_ + 1].signature), ": ");
}

/// The same; an error about another rank only after a while, because that rank may tell why.
void TrailingGuard::look() {
  const bool is_missing = !is_healthy();
  const auto now = Clock::now();
  if (!std::exchange(is_missing_, is_missing)) missing_since_ = now;
  if (!is_missing || now - missing_since_ < kGrace + 2 * period_) return;
  raise_missing();
}

void TrailingGuard::raise_missing() {
  const auto lost = watched_->lost();
  if (lost) throw PeerLost(lost->rank, oldest() + net::describe(*lost));
  try {
    guarded_->raise_missing();
  } catch (const CudaError& error) {
    throw CudaError(oldest() + error.what());
  }
  throw Error("unreachable: the library does not miss a rank");
}

TrailingGuard::Record TrailingGuard::record() {
  const std::lock_guard lock(mutex_);
  advance();
  Record mine;
  mine.calls = log_.count();
  mine.ended = ended_;
  mine.digest = log_[least_].digest;  // all ranks have the same number from the last round
  mine.has_failed = failed_.has_value();
  mine.is_suspended = suspended_;
  mine.is_leaving = leaving_;
  if (ended_ < log_.count()) {
    const Pending& oldest = pending(ended_ + 1);
    mine.waits_for_stream = oldest.stage == Stage::on_stream && !oldest.ticket->ready().done();
  }
  return mine;
}

/// Throws CollectiveMismatch, on all ranks.
void TrailingGuard::compare(const std::vector<Record>& records) {
  std::vector<CallDigest> digests;
  std::uint64_t least = records[0].calls;
  bool any_suspended = false;
  for (const Record& record : records) {
    digests.push_back(record.digest);
    least = std::min(least, record.calls);
    any_suspended |= record.is_suspended;
  }
  if (!same_calls(digests)) raise_difference(least_);
  const std::lock_guard lock(mutex_);
  verified_ = least_;
  least_ = least;
  any_suspended_ = any_suspended;
  last_ = records;
  changed_.notify_all();
}

/// All ranks call it with the same number.
void TrailingGuard::raise_difference(std::uint64_t until) {
  std::vector<CallDigest> mine;
  std::uint64_t first = 0;
  {
    const std::lock_guard lock(mutex_);
    first = verified_ + 1;
    for (std::uint64_t call = first; call <= until; ++call) mine.push_back(log_[call].digest);
  }
  const std::size_t count = mine.size();
  const std::vector<CallDigest> all = exchange(mine.data(), count);
  std::vector<CallDigest> of_call(static_cast<std::size_t>(world_size_));
  std::size_t at = 0;
  for (; at < count; ++at) {
    for (std::size_t rank = 0; rank < of_call.size(); ++rank) of_call[rank] = all[rank * count + at];
    if (!same_calls(of_call)) break;
  }
  Signature signature;
  SplitCounts splits;
  {
    const std::lock_guard lock(mutex_);
    differs_ = first + at;
    signature = log_[differs_].signature;
    splits = log_[differs_].splits;
  }
  const std::vector<Signature> signatures = exchange(&signature);
  require_same(world_size_, [&](int rank) -> const Signature& { return signatures[static_cast<std::size_t>(rank)]; });
  const std::vector<std::uint64_t> counts = exchange(splits.data(), splits.size());
  std::vector<SplitCounts> by_rank;
  for (std::size_t rank = 0; rank < signatures.size(); ++rank) {
    const auto begin = counts.begin() + static_cast<std::ptrdiff_t>(rank * splits.size());
    by_rank.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(splits.size()));
  }
  throw_split_mismatch(signatures[0], by_rank);
}

/// Sets the failure if this rank's first pending call is late.
void TrailingGuard::judge_lateness(const std::vector<Record>& records) {
  const std::lock_guard lock(mutex_);
  advance();
  if (ended_ == log_.count() || pending(ended_ + 1).stage == Stage::on_host) return;  // control's deadline
  const auto now = Clock::now();
  if (suspended_ || any_suspended_) oldest_since_ = now;
  const std::uint64_t oldest = ended_ + 1;
  for (int rank = 0; rank < world_size_; ++rank) {
    const Record& record = records[static_cast<std::size_t>(rank)];
    if (record.is_leaving && record.calls < oldest)
      net::throw_cause(net::Cause::left, rank, "", describe(log_[oldest].signature));
  }
  if (leaving_ && now >= leaving_until_)
    throw Error(text("communicator was closed while ", describe(log_[oldest].signature), " was on the device"));
  const Seconds waited = now - oldest_since_;
  if (waited >= Seconds(times_.longest_s())) throw Timeout(lateness(oldest, records));
  if (waited < Seconds(times_.warn_s) || warned_of_ == oldest) return;
  warned_of_ = oldest;
  // Only the first of the ranks that wait tells it.
  const auto first = std::find_if(records.begin(), records.end(), [=](const Record& r) { return r.calls >= oldest; });
  if (first - records.begin() == rank_) post_notice(lateness(oldest, records));
}

std::string TrailingGuard::lateness(std::uint64_t call, const std::vector<Record>& records) const {
  const Signature& signature = log_[call].signature;
  const bool is_over = Clock::now() - oldest_since_ >= Seconds(times_.longest_s());
  const double waited_s = is_over ? times_.longest_s() : times_.warn_s;
  std::vector<int> late, blocked;
  std::string details;
  for (int rank = 0; rank < world_size_; ++rank) {
    const Record& record = records[static_cast<std::size_t>(rank)];
    if (record.calls < call) {
      late.push_back(rank);
      details += record.calls == 0 ? text("; rank ", rank, " has called nothing yet")
                                   : text("; rank ", rank, " last called operation ", record.calls, ", ",
                                          describe(log_[record.calls].signature));
    }
    if (record.waits_for_stream && record.ended + 1 == call) blocked.push_back(rank);
  }
  const std::string head = text(describe(signature), " (operation ", call, "): rank ", rank_,
                                is_over ? " waited " : " has waited ", waited_s, " s ");
  if (!late.empty()) return text(head, "for rank ", list(late), " to call it", details);
  if (!blocked.empty())
    return text(head, "for rank ", list(blocked),
                ": all ranks have called it, but work before it on that rank's stream has not ended");
  return text(head, "for it to end: all ranks have called it, but a device, or the link to one, may have stopped");
}

/// The last round: the ranks that have failed tell it to all.
void TrailingGuard::tell() {
  Telling mine;
  {
    const std::lock_guard lock(mutex_);
    if (failed_) {
      mine.cause = failed_->cause;
      mine.rank = failed_->rank;
      std::strncpy(mine.message, failed_->message.c_str(), sizeof(mine.message) - 1);
    }
  }
  for (const Telling& telling : exchange(&mine))
    if (telling.cause != net::Cause::none)
      return set_failed({nullptr, telling.cause, telling.rank, telling.message});  // no effect after an own one
}

/// There are no more rounds, because a rank has died or left. Pending calls may end if it has done its part in them.
void TrailingGuard::outlive(int rank) {
  Lock lock(mutex_);
  lost_ = net::Loss{rank, net::Fate::left};
  changed_.notify_all();
  auto since = Clock::now();
  for (std::exception_ptr error; !stopping_ && !failed_; changed_.wait_for(lock, std::chrono::milliseconds(5))) {
    const std::uint64_t ended = ended_;
    bool is_missing = false, waits_for_stream = false;
    lock.unlock();
    try {
      is_missing = !is_healthy();
      waits_for_stream = record().waits_for_stream;
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    lost_ = worst_loss(*lost_);
    if (!error && ended_ == log_.count()) return;  // begin() lets no more calls in
    const auto now = Clock::now();
    if (ended_ != ended || waits_for_stream) since = now;
    if (suspended_) oldest_since_ = now;
    const Record& last = last_[static_cast<std::size_t>(lost_->rank)];
    const bool has_died = lost_->fate == net::Fate::died || is_missing;
    const bool has_called = last.is_leaving && last.calls > ended_;
    if (!error && ((has_died && now - since >= kGrace) || (!has_called && now - since >= kLongGrace) ||
                   now - oldest_since_ >= Seconds(times_.longest_s()))) {
      try {
        raise_lost(describe(log_[ended_ + 1].signature));
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (!error) continue;
    lock.unlock();
    fail(error);
    lock.lock();
  }
}

/// A rank that has died, or else the one that left.
net::Loss TrailingGuard::worst_loss(const net::Loss& known) const {
  for (int rank = 0; rank < world_size_; ++rank)
    if (watched_->fate(rank) == net::Fate::died) return {rank, net::Fate::died};
  return known;
}

}  // namespace zcomm::coll
