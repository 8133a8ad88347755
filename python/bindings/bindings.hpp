// Shared by the binding files: their entry points and memory that Python can see.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zcomm/communicator.hpp"
#include "zcomm/work.hpp"

namespace zcomm::bindings {

/// Bytes with an owner; supports the buffer protocol, so that torch.frombuffer makes a tensor of it without a copy.
struct Memory {
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
  std::shared_ptr<void> owner;
};

/// For objects that wait, or take a lock that others hold while they wait: never with the interpreter lock held.
template <class Type>
struct DeleteWithoutGil {
  void operator()(Type* object) const {
    const pybind11::gil_scoped_release release;
    delete object;
  }
};

/// Counts the waits of this process that an exception of a signal handler has ended.
inline std::atomic<std::uint64_t>& interrupt_count() {
  static std::atomic<std::uint64_t> count{0};
  return count;
}

/// Work that Python holds. started_after: interrupt_count() when it was started.
struct HeldWork final : Work {
  explicit HeldWork(Work work) : Work(std::move(work)), started_after(interrupt_count()) {}
  const std::uint64_t started_after;
};

/// Dropping a Work waits for its operation. Signal handlers run meanwhile; an exception of one ends the wait (the
/// operation is given up), and is raised as soon as possible. If the main thread drops a Work after such an exception
/// has ended a wait, or when no Python code runs any more, the operation is given up at once.
struct DropWork {
  void operator()(HeldWork* work) const;
};
using WorkHolder = std::unique_ptr<HeldWork, DropWork>;
inline WorkHolder hold(Work work) { return WorkHolder(new HeldWork(std::move(work))); }

using CommHolder = std::unique_ptr<Communicator, DeleteWithoutGil<Communicator>>;
inline CommHolder hold(std::unique_ptr<Communicator> communicator) { return CommHolder(communicator.release()); }

/// Passes the core's notices to Python's logging. Needs the interpreter's lock.
void log_notices();

/// Releases the interpreter lock for a call that may block, and lets Ctrl-C end it. They nest: a signal handler, which
/// runs within one, may make another.
class BlockingCall {
 public:
  BlockingCall() : outer_(std::exchange(running_, true)) {}
  ~BlockingCall() { running_ = outer_; }
  BlockingCall(const BlockingCall&) = delete;
  BlockingCall& operator=(const BlockingCall&) = delete;
  static bool is_running() { return running_; }

 private:
  struct Afterwards {
    ~Afterwards() { log_notices(); }
  };
  const Afterwards afterwards_;  // destroyed last: with the lock
  pybind11::gil_scoped_release release_;
  const bool outer_;
  inline static thread_local bool running_ = false;
};

/// Ends the waits of one thread, from anywhere: within enter() and leave() of that thread, its blocking calls throw
/// Error (`why`) once it is set. Thread rule: set() from any thread.
class Stop {
 public:
  explicit Stop(std::string why) : why_(std::move(why)) {}
  void set() { is_set_ = true; }
  bool is_set() const { return is_set_; }
  static void enter(std::shared_ptr<Stop> stop) { current().push_back(std::move(stop)); }
  static void leave() { current().pop_back(); }
  /// Throws if a Stop of this thread is set.
  static void check();

 private:
  static std::vector<std::shared_ptr<Stop>>& current() {
    static thread_local std::vector<std::shared_ptr<Stop>> stops;
    return stops;
  }
  const std::string why_;
  std::atomic<bool> is_set_{false};
};

/// (address, count) pairs as Python passes them.
using Spans = std::vector<std::pair<std::uintptr_t, std::size_t>>;

void bind_base(pybind11::module_& m);
void bind_codec(pybind11::module_& m);
void bind_comm(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_nccl(pybind11::module_& m);
void bind_cuda_ipc(pybind11::module_& m);
void bind_links(pybind11::module_& m);
void bind_heap(pybind11::module_& m);
void bind_mem(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_stream_kernels(pybind11::module_& m);

}  // namespace zcomm::bindings
