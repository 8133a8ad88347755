// Monitor: detects lost peers; owns the control sockets and pidfds, and the thread that watches them.
//
// [Note: liveness] The control socket of a pair carries only one goodbye byte. Its end without that byte, or the end of
// the peer's process (a forked child may keep sockets open for a dead parent), means that the peer died. Invariant: a
// peer's fate changes once, from alive to died or left ([Note: fates] in fate.hpp). Thread rule: free-threaded;
// callbacks run on the monitor's thread, which also closes the descriptors when it stops.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/unique_fd.hpp"
#include "net/mesh.hpp"

namespace zcomm::net {

class Monitor {
 public:
  /// By rank; empty for this rank.
  struct Watched {
    UniqueFd control;
    UniqueFd process;
  };

  explicit Monitor(std::vector<Watched> watched);
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;
  ~Monitor();

  std::optional<Loss> lost() const;
  Fate fate(int rank) const;
  std::optional<ProcessState> process(int rank) const;
  int on_loss(std::function<void(Loss)> callback);
  void forget(int id);

  /// Readable after a loss, until cleared: wakes one thread that polls.
  const UniqueFd& loss_event() const;

  void say_goodbye() noexcept;
  /// Ends the thread and closes the descriptors (later, if called on that thread). Idempotent.
  void stop() noexcept;
  /// For a forked child, which has no such thread: forgets it.
  void abandon() noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;  // also held by the thread: a callback may destroy the Monitor
  std::mutex thread_mutex_;
  std::thread thread_;
};

}  // namespace zcomm::net
