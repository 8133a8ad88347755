// Standstill: ranks that wait for each other in two communicators, each for an operation that the other will not call.
//
// [Note: standstill] In one communicator, ranks with different calls meet and compare them. In two communicators they
// would wait until the deadline. A rank that has waited for kFirst_s for others to enter an operation, and has an owner
// thread that cannot continue before (coll/callers.hpp), publishes the operation in its ControlBlock (`held`). In the
// blocks of its other communicators it publishes that no thread will call there before the owner continues (`rests`).
// Ranks are at a standstill if rank a is held by an operation that rank b has not entered, b by one that a has not
// entered, and each rests in the other's communicator. Only the end of one wait can change this, so a standstill seen
// for kSure is an error. Only waits that are already long pay for the search. Not detected: messages, waits with a time
// limit, other threads' waits, cycles of three ranks in communicators that no two have in common, jobs on several
// hosts. Invariants: the list of all communicators belongs to the process; an entry in a block is withdrawn when its
// wait ends. Thread rule: look() and withdraw() belong to the thread that runs the operation; the rest may be called
// from any.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "coll/callers.hpp"
#include "coll/shm/control_block.hpp"

namespace zcomm::coll {

class Standstill {
 public:
  /// `end(message)`: ends the operations of all ranks of the communicator.
  Standstill(const HostMemory& memory, std::function<void(const std::string&)> end);
  ~Standstill();
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;

  void set_callers(const Callers* callers);
  /// The operation `current` waits for `late` ranks to enter it. Ends it if they wait for this rank elsewhere.
  void look(const Signature& current, const std::vector<int>& late, double waited_s);
  /// The wait has ended.
  void withdraw() noexcept;

 private:
  struct Found {
    const Standstill* other = nullptr;
    int rank = 0, peer = 0;             // of the rank that waits there: in this communicator, and in the other
    std::uint32_t here = 0, there = 0;  // operations
    bool operator==(const Found&) const = default;
  };

  bool shows_rest(int rank) const;
  bool rests() const;
  Found find(const std::vector<int>& late) const;
  Signature signature_of(int rank) const;

  const HostMemory& memory_;
  const std::function<void(const std::string&)> end_;
  const Callers* callers_ = nullptr;
  bool shown_ = false;
  Found found_;
  Clock::time_point since_{};
};

}  // namespace zcomm::coll
