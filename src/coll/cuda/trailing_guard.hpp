// TrailingGuard: compares the calls of all ranks after they have started, when only a device ends them (nccl).
//
// [Note: guard behind] A call is on its stream as soon as its own rank has called it. So ranks compare calls
// afterwards, concurrently with the program: each call is added to a CallLog, and a thread of each rank meets the other
// ranks' threads in rounds, at each verify() and every 250 ms. A round is one all_gather of a Record, on the host, over
// a communicator of its own. A round tells how many calls all ranks have made, and the next one compares the digests of
// these calls. So a mismatch is found at most two rounds after the last rank has called. Then ranks exchange digests of
// single calls, and raise require_same's text for the first that differs. If digests agree, and a call does not end
// while another rank has not made it, that rank is late and is named at the deadline. A rank that finds a failure tells
// it in the next round. Then every rank stops its work on its device, so that nothing hangs. Results of a call that
// differs and of later ones, and of calls that had not ended, are spoiled: waiting for them raises.
//
// Invariants: at most CallLog::kRoom - 1 calls are not verified; a failure is set once, and the thread ends with it.
// Thread rule: begin, launched, ended and verify by the thread that runs operations; the rest from any thread. Source:
// decision D5.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "coll/cuda/call_log.hpp"
#include "coll/cuda/ticket.hpp"
#include "coll/failure_source.hpp"
#include "coll/late_clock.hpp"
#include "net/mesh.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::coll {

/// The engine's side, called on the guard's thread.
class Guarded {
 public:
  virtual ~Guarded() = default;
  /// Throws the error that its library has found. False: the library misses another rank.
  virtual bool look() = 0;
  /// Throws the library's words for that.
  virtual void raise_missing() = 0;
  /// Ends all that is on the device, and each wait of this rank's host for other ranks.
  virtual void stop() noexcept = 0;
};

class TrailingGuard final : public FailureSource {
 public:
  static constexpr std::uint64_t kPending = 64;  ///< calls that have not ended; more than an engine has in flight

  /// `rounds` is of the same ranks as `watched`, has no other user and outlives stop(). Local.
  TrailingGuard(Communicator& rounds, std::shared_ptr<net::Mesh> watched, const WaitTimes& times, double period_s);
  ~TrailingGuard() override { stop(); }
  TrailingGuard(const TrailingGuard&) = delete;
  TrailingGuard& operator=(const TrailingGuard&) = delete;

  /// Starts the rounds. `guarded` outlives stop().
  void start(Guarded& guarded);
  /// Ends the thread; a failure is kept.
  void stop() noexcept;

  /// A call, which it numbers. `ticket`: ends with it; null for a call that ends on the host, by ended(). Blocks while
  /// too many calls are not verified. Throws the failure; Timeout.
  void begin(Operation& operation, std::shared_ptr<Ticket> ticket);
  /// The call waits on the host for other ranks, with a deadline of its own; until launching().
  void waits_on_host() { set_stage(Stage::on_host); }
  void launching() { set_stage(Stage::launching); }
  /// The end of the call's ticket has been recorded.
  void launched() { set_stage(Stage::on_stream); }
  /// The call has ended on the host.
  void ended() { set_stage(Stage::over); }

  /// Waits until all ranks have made the calls so far, and the same ones. `behind`: only those before the last
  /// verify(), so that a program which calls it once per step seldom waits. Throws the failure; Timeout.
  void verify(bool behind);
  /// This rank makes no more calls. Calls that are pending after `patience_s` fail.
  void leave(double patience_s) noexcept;
  /// After leave(): waits until all calls have ended and are verified (or the failure was told), or that time is over.
  /// Returns whether all is well; else the communicator has failed.
  bool settle() noexcept;

  /// The first failure wins; the other ranks are told. `leaves`: this rank's program has stopped it, so others get
  /// PeerLost.
  void fail(const std::exception_ptr& error, bool leaves = false) noexcept;
  bool has_failed() const;
  /// Waits until it has, for about two rounds at most.
  bool will_fail();
  /// For a new call: says since when the communicator is unusable, unless the program has not seen the failure yet.
  void throw_again_if_failed(const Signature& during) const;
  /// The text of a mismatch that no call has thrown; "" if there is none.
  std::string unreported() const;
  void throw_if_failed(const Signature& during) const override;
  void throw_if_spoiled(const Signature& during) const override;
  void suspend_deadline(bool suspended);

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// Told by each rank in a round.
  struct Record {
    std::uint64_t calls = 0, ended = 0;  ///< made; ended on the device
    CallDigest digest;                   ///< of the calls that all ranks had made by the last round
    bool has_failed = false, is_suspended = false, is_leaving = false;
    bool waits_for_stream = false;  ///< work of its program, before its first pending call, has not ended
  };
  /// A failure as ranks tell it.
  struct Telling {
    net::Cause cause = net::Cause::none;
    std::int32_t rank = -1;
    char message[1016] = {};
  };
  enum class Stage { on_host, launching, on_stream, over };
  struct Pending {
    std::shared_ptr<Ticket> ticket;
    Stage stage = Stage::over;
  };
  struct Failed {
    std::exception_ptr own;  ///< null if another rank told it
    net::Cause cause = net::Cause::none;
    int rank = -1;
    std::string message;
    std::uint64_t good = 0;  ///< results of calls up to this one are valid
  };

  void loop() noexcept;
  bool is_stopping() const;
  bool round();
  void look();
  bool is_healthy();
  std::string oldest() const;
  Record record();
  void compare(const std::vector<Record>& records);
  [[noreturn]] void raise_difference(std::uint64_t until);
  void judge_lateness(const std::vector<Record>& records);
  void tell();
  void outlive(int rank);
  template <class Type>
  std::vector<Type> exchange(const Type* mine, std::size_t count = 1);

  void set_stage(Stage stage);
  Pending& pending(std::uint64_t call) { return pending_[call % kPending]; }
  void advance();
  void set_failed(Failed failed) noexcept;
  Failed failed_by(const std::exception_ptr& error) const noexcept;
  [[noreturn]] void raise(const std::string& during) const;
  [[noreturn]] void raise_again(const std::string& during) const;
  [[noreturn]] void raise_missing();
  void raise_lost(const std::string& during) const;
  net::Loss worst_loss(const net::Loss& known) const;
  void wait_verified(Lock& lock, std::uint64_t target, const std::string& during);
  std::string lateness(std::uint64_t call, const std::vector<Record>& records) const;

  Communicator& rounds_;
  const std::shared_ptr<net::Mesh> watched_;
  const int rank_, world_size_;
  const WaitTimes times_;
  const std::chrono::duration<double> period_;
  Guarded* guarded_ = nullptr;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  CallLog log_;
  std::array<Pending, kPending> pending_;
  std::uint64_t ended_ = 0, verified_ = 0, marked_ = 0;
  std::uint64_t least_ = 0;    // calls that all ranks had made by the last round
  std::uint64_t differs_ = 0;  // the first call that differs
  std::uint64_t warned_of_ = 0;
  int wanted_rounds_ = 0, waiting_ = 0;
  bool suspended_ = false, any_suspended_ = false, stopping_ = false, leaving_ = false, is_missing_ = false;
  bool is_over_ = false;           // the thread has ended
  std::optional<net::Loss> lost_;  // rounds are over, but pending calls may end
  std::optional<Failed> failed_;
  mutable bool is_reported_ = false;
  std::vector<Record> last_;  // of the last round
  Clock::time_point oldest_since_{}, missing_since_{}, leaving_until_{};
  std::thread thread_;
};

}  // namespace zcomm::coll
