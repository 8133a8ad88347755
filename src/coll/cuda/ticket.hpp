// Ticket: one operation between its caller's stream and the engine's (cuda_ipc, nccl); DeviceLiveness: the host's eye.
//
// A ticket holds two points: `ready`, in the stream that the call named, which precedes the operation; and `end`, in
// the engine's stream, which precedes each use of the results (Work::wait). Both outlive the engine.
// Invariant: an event is recorded again only after its ticket has returned to the pool, that is, when no Work and no
// queue holds it any more. Thread rule: free-threaded, but called() and run by one thread each.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "coll/failure_source.hpp"
#include "coll/operation.hpp"
#include "device/device.hpp"
#include "zcomm/work.hpp"

namespace zcomm::coll {

/// Waits for a device on the host, and gives work to the callers' streams.
class DeviceLiveness {
 public:
  /// `failures` reports other ranks' failures, until detach().
  DeviceLiveness(std::shared_ptr<device::Device> device, std::shared_ptr<const FailureSource> failures, int rank,
                 double timeout_s)
      : device_(std::move(device)), failures_(std::move(failures)), rank_(rank), timeout_s_(timeout_s) {}

  device::Device& device() const { return *device_; }
  /// Puts `event` on the stream of that native handle.
  void record(std::uintptr_t stream, device::Event& event);
  /// Copies device memory on that stream.
  void copy(std::uintptr_t stream, void* dst, const void* src, std::size_t nbytes);
  /// Makes that stream wait for `event`. Throws CudaError, and the failure that stopped another rank from doing its
  /// part.
  void order(std::uintptr_t stream, device::Event& event, const Signature& during);
  /// Blocks. Throws PeerLost, Timeout, CudaError, or Error (closed here, failed elsewhere).
  void wait(device::Event& event, const Signature& during);
  /// Blocks for `patience_s` at most, or until a failure that another rank's part may never survive. Throws as wait().
  bool wait_for(device::Event& event, double patience_s, const Signature& during);

  void close() noexcept { closing_ = true; }
  void suspend_deadline(bool suspended) noexcept { suspended_ = suspended; }
  void detach() noexcept;

 private:
  struct Look;
  device::Stream& caller_stream(std::uintptr_t native);
  void look_around(Look& look, const Signature& during);
  std::exception_ptr failure(const Signature& during);
  void throw_if_spoiled(const Signature& during);

  const std::shared_ptr<device::Device> device_;
  std::mutex failures_mutex_;
  std::shared_ptr<const FailureSource> failures_;
  const int rank_;
  const double timeout_s_;
  std::atomic<bool> closing_{false}, suspended_{false};
  std::mutex mutex_;
  std::vector<std::pair<std::uintptr_t, std::unique_ptr<device::Stream>>> streams_;  // adopted, by native handle
};

class Ticket final : public DeviceTail {
 public:
  explicit Ticket(std::shared_ptr<DeviceLiveness> liveness)
      : liveness_(std::move(liveness)),
        ready_(liveness_->device().make_event()),
        end_(liveness_->device().make_event()) {}

  /// On the caller's thread: orders the operation after all work already on the caller's stream.
  void called(std::uintptr_t stream) noexcept;
  /// Throws the error of called(), if there was one.
  device::Event& ready();
  device::Event& end() { return *end_; }

  void order(std::optional<std::uintptr_t> stream) override;
  bool wait_for(double patience_s) override;
  void drop() noexcept override;
  bool done() noexcept override;

  Signature signature;  ///< for messages

 private:
  /// One use by a Work: over before called() of the ticket's next life, which sees only that it has no holder.
  struct Use {
    std::mutex& mutex;
    ~Use() { const std::lock_guard lock(mutex); }
  };
  const std::shared_ptr<DeviceLiveness> liveness_;
  const std::unique_ptr<device::Event> ready_, end_;
  std::uintptr_t stream_ = 0;
  std::exception_ptr failed_;
  std::atomic<bool> ordered_{false};
  std::mutex lives_;
};

class TicketPool {
 public:
  explicit TicketPool(std::shared_ptr<DeviceLiveness> liveness) : liveness_(std::move(liveness)) {}
  /// Engine::prepare: sets a ticket as the operation's tail.
  void prepare(Operation& operation, const Call& call) noexcept;
  /// A ticket of an operation that is called now, on that stream.
  std::shared_ptr<Ticket> called(std::uintptr_t stream);
  /// The operation's ticket. Throws CudaError if there was none to give.
  std::shared_ptr<Ticket> of(const Operation& operation) const;

 private:
  std::shared_ptr<Ticket> take();

  const std::shared_ptr<DeviceLiveness> liveness_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Ticket>> all_;
  std::size_t next_ = 0;
};

}  // namespace zcomm::coll
