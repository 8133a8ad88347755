// Callers: an engine's questions to the communicator in front of it, about the threads that call there.
//
// The owner is the thread that made the communicator. Its calls come from itself, or from threads that serve queues
// which it alone feeds (base/worker_load.hpp). If another thread has called, nothing is known about the calls to come.
// Thread rule: free-threaded.
#pragma once

#include "base/worker_load.hpp"

namespace zcomm::coll {

class Callers {
 public:
  virtual ~Callers() = default;
  virtual ThreadId owner() const = 0;
  /// Whether no operation runs or is queued, and the owner's threads alone have called, once at least.
  virtual bool rests() const = 0;
  /// To be called by the thread that runs an operation: the thread that waits for it, if the owner cannot go on before
  /// it has ended: the owner, or one with a call that the owner waits for. Null otherwise.
  virtual ThreadId held() const = 0;
};

}  // namespace zcomm::coll
