// TcpMessenger: send and recv over links, on TcpControl's thread.
//
// [Note: messages] Up to kEagerNbytes a message is sent at once with its elements, and the send is done when it is
// queued; the receiver keeps unexpected messages, kCreditNbytes at most. Larger ones are announced; when the other side
// has a matching recv it grants them, and their frames are received directly into its buffers. Messages of one pair and
// tag match in call order, because frames of a pair stay in order. If dtype, element or count differ, both sides get
// CollectiveMismatch (for a small send that is already done: a recv of the sender's that waits for that peer throws it,
// or else its next call with it). Only the message fails at its deadline; the communicator remains usable. Thread rule:
// free-threaded; TcpControl's mutex guards all.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "coll/late_clock.hpp"
#include "coll/matching.hpp"
#include "coll/messenger.hpp"
#include "coll/tcp/sockets.hpp"

namespace zcomm::coll {

class TcpMessenger final : public Messenger, private TcpControl::Handler {
 public:
  static constexpr std::size_t kEagerNbytes = 16 << 10;
  static constexpr std::size_t kCreditNbytes = 1 << 20;

  /// Starts `post`.
  TcpMessenger(TcpControl& post, const WaitTimes& times);
  ~TcpMessenger() override { close(); }

  Work send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call) override;
  Work recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call, int* source) override;
  void close() noexcept override;

 private:
  /// One side of a message that this rank has called for.
  struct Pending {
    bool is_send;
    int peer;  // -1: any
    int tag;
    DType dtype;
    ElementName element;
    std::uint64_t count;
    std::vector<iovec> pieces;
    const char* site;
    int* source = nullptr;
    std::uint64_t id = 0;         // the sender's number of it, once known
    std::size_t done_nbytes = 0;  // sent, or received
    bool granted = false;         // bytes flow; of a recv: it is matched
    LateClock clock{};
    Clock::time_point asked{};  // when the peer was asked for a sign of life
    std::shared_ptr<Completion> completion{};
  };
  using Entry = std::list<Pending>::iterator;
  using Messages = Matching<Entry, Frame>;  // an announced message is complete: it has no payload yet
  struct PeerState {
    std::uint64_t next_id = 1;
    std::size_t credit = kCreditNbytes;
    std::string complaint;  // about a small send that was already done
  };

  void begin(int peer, const Frame& head, std::vector<iovec>& target) override;
  void end(int peer, const Frame& head) override;
  void sent(int peer, std::uint64_t key, std::size_t nbytes) override;
  Clock::time_point expire(Clock::time_point now) override;
  void gone(int peer) override;
  void failed() override;

  Work finish(Work work, std::shared_ptr<Completion> completion, std::unique_lock<std::mutex>& lock, const Call& call);
  void require_open(int peer);
  Pending make(bool is_send, int peer, int tag, DType dtype, const Call& call);
  Entry find(bool is_send, int peer, std::uint64_t id);
  bool all_gone() const;
  void arrive(int peer, const Frame& head, std::vector<iovec>& target);
  bool agree(Entry recv, int peer, const Frame& head);
  void be_refused(int peer, const Frame& head);
  void accept(Pending& recv, int peer, const Frame& head);
  void give_credit(int peer, std::size_t nbytes);
  std::string mismatch(int from, int to, int tag, const std::string& sent, const std::string& wanted) const;
  void take(Entry recv, Messages::Early& message);
  void send_next(Pending& send);
  void end_pending(Entry entry, std::exception_ptr error = nullptr);
  void give_up(const Completion& completion) noexcept;
  std::exception_ptr lost(const Pending& pending, int peer) const;
  bool look_at_late(Pending& pending, Clock::time_point now);
  std::string late_message(const Pending& pending, bool has_answered) const;
  std::string describe(const Pending& pending) const;

  TcpControl& control_;
  const WaitTimes times_;
  std::vector<PeerState> peers_;
  std::list<Pending> pending_;  // in call order
  Messages matching_;
  const std::shared_ptr<GiveUp> give_up_;
  CompletionPool completions_{give_up_};
  bool closed_ = false;
};

}  // namespace zcomm::coll
