// TcpFailure: the failure of a communicator over links, the same on all of its ranks.
//
// The first failure that a rank notices or receives counts; it is sent to all peers, which adopt it unless they already
// have one. So all ranks report the first failure, not its consequences.
// Thread rule: free-threaded.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "net/fate.hpp"
#include "net/socket.hpp"

namespace zcomm::coll {

struct FailureReport {
  net::Cause cause = net::Cause::none;
  int rank = -1;        ///< rank of the mesh
  std::string message;  ///< empty for died and left
};

class TcpFailure {
 public:
  /// Whether it was the first.
  bool set(FailureReport report);
  bool is_set() const { return is_set_.load(std::memory_order_acquire); }
  FailureReport report() const;
  /// `during`: this rank's operation.
  void throw_if_set(const std::string& during) const;
  /// Readable once set, for poll().
  int event() const { return event_.get(); }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_set_{false};
  FailureReport report_;
  UniqueFd event_ = net::make_event();
};

}  // namespace zcomm::coll
