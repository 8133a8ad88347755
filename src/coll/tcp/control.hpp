// TcpControl: one thread that serves all peers concurrently with the collectives: messages, failures, each rank's
// progress.
//
// One socket per peer carries frames: a head, then head.nbytes of payload. Control frames (failures, goodbyes, deadline
// suspended, "which operation?") are handled here; frames of messages by the Handler (TcpMessenger). Invariants: frames
// to one peer leave in the order of enqueue(), urgent ones before bulk ones, never inside another; a frame's head is
// validated before its payload is used, so bytes that are not a frame end in an error. Thread rule: `mutex()` guards
// everything here and in the Handler, which is called with it held.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.hpp"
#include "coll/messenger.hpp"
#include "coll/signal.hpp"
#include "coll/signature.hpp"
#include "coll/tcp/failure.hpp"

namespace zcomm::coll {

enum class FrameKind : std::uint32_t {
  message = 1,  ///< a small message: head and elements
  announce,     ///< a large one: may I send it?
  grant,        ///< send it
  data,         ///< a piece of it
  taken,        ///< a small message was received: nbytes of credit are free again
  refuse,       ///< the message does not match the receive
  poison,       ///< the communicator has failed
  bye,          ///< this rank closes it
  suspend,      ///< no rank that waits for this one is at the deadline...
  resume,       ///< ...any more
  ask,          ///< which operation did you enter last?
  answer        ///< the operation entered last
};

struct Frame {
  static constexpr std::uint32_t kMagic = 0x7a636c32;  // "zcl2"
  std::uint32_t magic = kMagic;
  FrameKind kind = FrameKind::bye;
  std::int32_t tag = 0;
  std::uint32_t dtype = 0;
  std::uint64_t id = 0;
  std::uint64_t count = 0;
  std::uint64_t nbytes = 0;  ///< of payload behind this head
  ElementName element{};
};

class TcpControl {
 public:
  static constexpr std::size_t kMaxFrameNbytes = 256 << 10;  ///< payload of one frame

  /// All with the mutex held.
  class Handler {
   public:
    virtual ~Handler() = default;
    /// Fills `target` with the destination of head.nbytes of payload; throws Error for an invalid frame.
    virtual void begin(int peer, const Frame& head, std::vector<iovec>& target) = 0;
    virtual void end(int peer, const Frame& head) = 0;
    /// The bytes of an enqueued frame with this nonzero key have left.
    virtual void sent(int peer, std::uint64_t key, std::size_t nbytes) = 0;
    /// Ends messages past their deadline; returns the next deadline.
    virtual Clock::time_point expire(Clock::time_point now) = 0;
    /// `peer` will send nothing more.
    virtual void gone(int peer) = 0;
    /// The failure was set.
    virtual void failed() = 0;
  };

  /// sockets: by rank of the mesh; empty for itself and for ranks without a link.
  TcpControl(int rank, std::vector<UniqueFd> sockets, TcpFailure& failure);
  ~TcpControl() { close(); }
  void start(Handler& handler);
  /// Sends a goodbye and all queued frames while peers read them (for a second at most), joins the thread.
  void close() noexcept;

  std::mutex& mutex() { return mutex_; }
  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(peers_.size()); }
  TcpFailure& failure() { return failure_; }

  /// With the mutex held. `pieces` must stay untouched until sent(key); `owned` is kept here.
  void enqueue(int peer, Frame head, std::vector<std::byte> owned = {});
  void enqueue_bulk(int peer, Frame head, std::vector<iovec> pieces, std::uint64_t key);
  /// With the mutex held: drops the payload that is arriving for frame `id` of `peer`.
  void discard_incoming(int peer, std::uint64_t id);
  /// With the mutex held: the pieces that enqueue_bulk got for `key` are no longer read, as if all of them had been
  /// sent.
  void withdraw(int peer, std::uint64_t key);
  bool has_link(int peer) const { return static_cast<bool>(peers_[static_cast<std::size_t>(peer)].socket); }
  bool is_gone(int peer) const { return peers_[static_cast<std::size_t>(peer)].gone; }
  /// With the mutex held: asks `peer` for the operation that it entered last; see last_frame_at() and last_entered().
  void ask(int peer) { enqueue(peer, {.kind = FrameKind::ask}); }
  /// With the mutex held: the arrival time of the last frame from `peer`.
  Clock::time_point last_frame_at(int peer) const { return peers_[static_cast<std::size_t>(peer)].last_frame_at; }
  /// With the mutex held: the operation of its last answer; sequence 0: none.
  const Signature& last_entered(int peer) const { return peers_[static_cast<std::size_t>(peer)].last_entered; }
  /// " (host 10.0.0.2)" by the peer's address, "" if the sockets have none.
  std::string host_of(int peer) const;
  /// With the mutex held: makes the thread look at deadlines and queues.
  void wake() noexcept { net::signal_event(event_); }

  /// From any thread, without the mutex:
  /// Sets the failure, if there is none yet, and sends it to all peers.
  void fail(FailureReport report) noexcept;
  void suspend_deadline(bool suspended);
  bool any_suspended() const { return suspended_.load(std::memory_order_acquire) > 0; }
  /// Whether `peer` can send nothing more.
  bool has_received_all(int peer) {
    const std::lock_guard lock(mutex_);
    return is_gone(peer);
  }
  bool has_closed(int peer) const { return peers_[static_cast<std::size_t>(peer)].bye.load(std::memory_order_acquire); }
  void set_entered(const Signature& signature);
  /// The signature that each rank entered last; none for ranks that do not answer in time.
  std::vector<std::optional<Signature>> ask_all(double patience_s);

 private:
  struct Outgoing {
    Frame head;
    std::vector<std::byte> owned;
    std::vector<iovec> pieces;
    std::uint64_t key = 0;
  };
  struct Peer {
    UniqueFd socket;
    bool gone = false;
    bool broken = false;  // nothing can be sent any more; received bytes are still read
    std::atomic<bool> bye{false};
    bool suspended = false;
    std::deque<Outgoing> urgent, bulk;
    std::deque<Outgoing>* sending = nullptr;  // the queue with a partly sent first frame
    std::size_t sent_nbytes = 0;              // of that frame, head included
    Frame head{};                             // being received
    std::size_t head_nbytes = 0;
    std::vector<iovec> target;
    std::size_t missing = 0;  // payload bytes
    bool body = false;        // head complete, payload expected
    std::vector<std::byte> control;
    Clock::time_point last_frame_at{};
    Signature last_entered{};
  };

  void loop() noexcept;
  bool wait(std::unique_lock<std::mutex>& lock);
  void pump_out(int peer);
  void pump_in(int peer);
  void begin_frame(int peer);
  void end_frame(int peer);
  void lose(int peer);
  void broadcast_failure();
  void answer(int peer, const Frame& question);
  bool all_sent() const;

  const int rank_;
  TcpFailure& failure_;
  Handler* handler_ = nullptr;
  std::mutex mutex_;
  std::vector<Peer> peers_;
  std::vector<std::byte> waste_;
  bool failure_broadcast_ = false, closing_ = false, own_suspended_ = false;
  Clock::time_point close_by_{};
  UniqueFd event_ = net::make_event();
  std::vector<pollfd> fds_;
  std::thread thread_;

  std::atomic<int> suspended_{0};
  std::mutex entered_mutex_;
  Signature entered_{};
  std::condition_variable answered_;
  std::uint64_t question_ = 0;
  std::vector<std::optional<Signature>> answers_;
};

}  // namespace zcomm::coll
