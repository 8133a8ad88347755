// State shared by the simulated device's parts: points in streams, loss, memory accounting, the registry behind
// handles.
// A point is passed when its stream reaches it, and lost when it never will: the device failed, or the stream waits for
// a lost point. Streams that wait for a lost point block for ever, as a GPU's would; a thread that would wait for them
// gets CudaError instead, so that a test fails and does not hang. Thread rule: free-threaded.
// without end gets CudaError instead, so that a test fails and does not hang. Thread rule: free-threaded.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "doubles/simulated/device.hpp"

namespace zcomm::device::simulated {

class Point {
 public:
  enum class Fate { pending, passed, lost };
  void resolve(Fate fate) {
    const std::lock_guard lock(mutex_);
    fate_ = fate;
    changed_.notify_all();
  }
  Fate fate() const {
    const std::lock_guard lock(mutex_);
    return fate_;
  }
  /// Waits until it is passed or lost, or until the time has passed.
  Fate wait_for(double patience_s);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Fate fate_ = Fate::pending;
};

/// The part of a device that streams, events and memory keep alive.
class State {
 public:
  explicit State(SimulatedOptions options) : options_(std::move(options)) {}
  const SimulatedOptions& options() const { return options_; }

  /// Throws CudaError once the device is lost.
  void check() const;
  /// check() for an operation on a stream; counts towards lose_after.
  void begin_operation();
  void lose_after(std::uint64_t n) { left_ = n; }
  void lose(const std::string& why) noexcept;
  bool is_lost() const { return lost_.load(std::memory_order_acquire); }
  std::uint64_t next_stream() { return streams_.fetch_add(1); }

  void take(std::size_t nbytes);  ///< throws CudaError if less memory is left
  void give_back(std::size_t nbytes) noexcept;
  MemoryInfo memory() const;

 private:
  const SimulatedOptions options_;
  std::atomic<std::uint64_t> left_{0}, streams_{0};
  std::atomic<bool> lost_{false};
  mutable std::mutex mutex_;
  std::string why_;
  std::size_t used_nbytes_ = 0;
};

/// The state shared by all openers of an event.
struct SharedEvent {
  std::mutex mutex;
  std::shared_ptr<Point> last;  ///< null: never recorded
};

struct Allocation {
  Allocation(std::shared_ptr<State> owner, std::size_t size);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  std::shared_ptr<State> state;
  std::size_t nbytes;
  std::byte* data;
};

/// Names live objects of this process by number, so that another device (another rank's) can open them.
SharedHandle handle_of(const std::shared_ptr<SharedEvent>& event);
SharedHandle handle_of_memory(const void* data);  ///< within a live Allocation; throws InvalidArgument
std::shared_ptr<SharedEvent> find_event(const SharedHandle& handle);
Memory find_memory(const SharedHandle& handle);
void enlist(const std::shared_ptr<Allocation>& allocation);

}  // namespace zcomm::device::simulated
