// NcclChannel: messages from one rank to another, by a communicator of NCCL of these two ranks, on a stream of its own.
//
// Each direction of each pair of ranks has a channel. So no message waits for a collective or for a message of another
// pair, and two ranks that first send to each other do not wait for each other. A thread runs the messages in order: it
// joins the other rank, puts each message on the stream after the earlier work of its caller's stream, and watches the
// stream until the message has ended there. Invariant: both ranks run the same messages in the same order; a failure
// ends the channel and all its messages on both ranks. Thread rule: free-threaded.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "coll/cuda/nccl_comm.hpp"
#include "coll/cuda/nccl_message.hpp"
#include "device/device.hpp"
#include "net/mesh.hpp"

namespace zcomm::coll {

class NcclChannel {
 public:
  /// Called on the channel's thread, without its lock.
  class Owner {
   public:
    virtual ~Owner() = default;
    /// The message has failed, before it was finished or on the device.
    virtual void message_failed(NcclMessage& message, const std::exception_ptr& error) = 0;
    /// All messages have failed. `told`: by the other rank.
    virtual void channel_failed(NcclChannel& channel, const std::string& why, bool told) = 0;
  };
  struct Ends {
    int peer;
    bool sends;           ///< from this rank to `peer`
    std::uint64_t epoch;  ///< counts the channels of this direction of the pair
    NcclId id;
  };

  NcclChannel(const Ends& ends, std::shared_ptr<device::Device> device, const NcclLibrary& nccl,
              std::shared_ptr<net::Mesh> watched, double timeout_s, Owner& owner);
  ~NcclChannel() { leave(0); }
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;

  const Ends& ends() const { return ends_; }
  /// Runs the message, and returns null; or returns the error of the channel, which cannot run it any more.
  std::exception_ptr push(std::shared_ptr<NcclMessage> message);
  /// Ends the channel. `told`: by the other rank, which knows it.
  void fail(const std::exception_ptr& error, bool told);
  bool has_failed() const;
  bool has(const Completion& completion) const;
  void suspend_deadline(bool suspended) { suspended_ = suspended; }
  /// Lets it end in good order; messages that have not ended after `patience_s` fail.
  void begin_leave(double patience_s) noexcept;
  /// The same; joins the thread.
  void leave(double patience_s) noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;

  void loop() noexcept;
  void run();
  void launch(NcclMessage& message);
  void look();
  void look_at_peer(Clock::time_point now);
  void retire();
  void end_all(const std::exception_ptr& error) noexcept;
  std::string oldest() const;

  const Ends ends_;
  const std::shared_ptr<device::Device> device_;
  const NcclLibrary& nccl_;
  const std::shared_ptr<net::Mesh> watched_;
  const double timeout_s_;
  Owner& owner_;
  NcclComm comm_;
  const std::unique_ptr<device::Stream> stream_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<NcclMessage>> queued_, in_flight_;
  Clock::time_point since_ = Clock::now();  // the oldest message is the oldest one
  std::optional<Clock::time_point> lost_since_, leaves_at_;
  std::exception_ptr failure_;
  bool is_over_ = false, told_ = false;
  std::atomic<bool> suspended_{false};
  std::thread thread_;  // last: it uses all of these
};

}  // namespace zcomm::coll
