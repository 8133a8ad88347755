// Callers: an engine's questions to the communicator in front of it, about the threads that call there.
//
// The owner is the thread that made the communicator. It calls itself, or through threads that serve queues fed only by
// it (base/worker_load.hpp). Once another thread has called, later calls cannot be predicted.
// Thread rule: free-threaded.
#pragma once

#include "base/worker_load.hpp"

namespace zcomm::coll {

class Callers {
 public:
  virtual ~Callers() = default;
  virtual ThreadId owner() const = 0;
  /// Whether no operation runs or is queued, and at least one call was made, all by the owner's threads.
  virtual bool rests() const = 0;
  /// Called by the thread that runs an operation. Returns the thread that waits for the operation if the owner cannot
  /// continue before it ends: the owner, or a thread with a call that the owner waits for. Null otherwise.
  virtual ThreadId held() const = 0;
};

}  // namespace zcomm::coll
