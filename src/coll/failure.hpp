// Failure: the first error of a communicator, which every later call repeats (decision D5).
//
// Thread rule: free-threaded; the first set() wins.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <string>

#include "zcomm/communicator.hpp"

namespace zcomm::coll {

/// An error of the same type with `before` in front of its message. rank: PeerLost::rank of a PeerLost.
std::exception_ptr prefixed(const std::exception_ptr& error, const std::string& before,
                            std::optional<int> rank = std::nullopt);
/// An error of the same type with the text of `ranks` after its message; a PeerLost has the rank of the job, too.
std::exception_ptr placed(const std::exception_ptr& error, const RanksInJob& ranks);
/// An error of the type of `first` that says since when the communicator is unusable, as `first` itself may do.
std::exception_ptr repeated(const std::exception_ptr& first);

class Failure {
 public:
  void set(std::exception_ptr error) noexcept;
  /// See above; null while all is well.
  std::exception_ptr repeated() const;
  void throw_if_set() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_set_{false};
  std::exception_ptr first_;
};

}  // namespace zcomm::coll
