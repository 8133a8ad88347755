// Liveness: waits for peers, and ends waits that cannot succeed.
//
// [Note: first failure] The rank that notices a failure first sets rank 0's poison word and wakes all; all ranks then
// report that failure, not the ranks that fail after it. A reached value counts before any failure: an operation
// succeeds if the peers did their part, even if they have ended since.
// Thread rule: begin() and the waits belong to the thread that runs the operation; the rest may be called from any
// thread. Source: decision D5.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coll/failure_source.hpp"
#include "coll/late_clock.hpp"
#include "coll/shm/control_block.hpp"
#include "coll/shm/standstill.hpp"

namespace zcomm::coll {

class Liveness final : public FailureSource {
 public:
  Liveness(std::shared_ptr<net::Mesh> mesh, const HostMemory& memory, const WaitTimes& times);
  ~Liveness() override;
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  /// Starts the clock of an operation; throws the failure if there has been one.
  void begin(const Signature& signature);
  /// Waits until `peer` has reached `target`; throws PeerLost, Timeout, or Error (closed here, failed elsewhere).
  void wait(Stage stage, int peer, std::uint32_t target);
  /// wait() for each rank but this one.
  void wait_for_peers(Stage stage, std::uint32_t target);

  /// Throws the failure that all ranks report, if there has been one, naming `during`. From any thread.
  void throw_if_failed(const Signature& during) const override;

  /// Poisons the communicator: this rank cannot continue. The first failure of all wins.
  void fail(const std::string& what) noexcept;
  /// Poisons the communicator: this rank's program stops, and the others get PeerLost. The first failure of all wins.
  void leave() noexcept { poison(net::Cause::left, memory_.rank()); }
  /// Ends the waits of this rank (with Error), and the others' waits for it (with PeerLost).
  void close() noexcept;

  /// While suspended, neither this rank nor those that wait for it are at the deadline.
  void suspend_deadline(bool suspended) noexcept;

  /// The longest that a wait may last.
  double longest_s() const { return clock_.times().longest_s(); }
  void set_callers(const Callers& callers) { standstill_.set_callers(&callers); }
  /// Text at the beginning of each notice: the enclosing operation and its ranks.
  void set_context(std::function<std::string()> context) { context_ = std::move(context); }

 private:
  /// Ends the operation that all ranks wait for, with CollectiveMismatch.
  void end_standstill(const std::string& message) noexcept;
  void throw_if_poisoned() const;
  [[noreturn]] void throw_poison(std::uint32_t word, const std::string& during) const;
  void poison(net::Cause cause, int rank) const noexcept;
  void look_around(Stage stage, int peer, std::uint32_t target);
  /// The ranks that this one waits for.
  std::vector<int> late_ranks(Stage stage, int waited_for, std::uint32_t target) const;
  void give_up_late(Stage stage, const std::vector<int>& late);
  void warn(Stage stage, std::uint32_t target, const std::vector<int>& late);
  void log_arrival();
  std::string complaint(Stage stage, const std::vector<int>& late, bool has_ended) const;
  void restart_clock();
  bool is_suspended(int rank) const;
  bool has_reached(int peer, Stage stage, std::uint32_t target) const;
  std::string last_operation(int peer) const;
  std::string during() const;

  std::shared_ptr<net::Mesh> mesh_;
  const HostMemory& memory_;
  Patience patience_;
  const Signature* current_ = nullptr;
  LateClock clock_;
  bool has_deadline_ = false;   // the clock is first read when a wait becomes long
  std::vector<int> warned_of_;  // until they have come
  Stage warned_stage_{};
  std::uint32_t warned_target_ = 0;
  Standstill standstill_;
  std::function<std::string()> context_ = [] { return std::string(); };
  std::atomic<bool> closing_{false};
  int callback_ = -1;
};

}  // namespace zcomm::coll
