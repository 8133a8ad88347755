// NcclMessenger: send and recv of device memory by NCCL, matched on the host.
//
// [Note: messages by NCCL] NCCL knows no tags and no receive from any rank, and does not compare the two sides. So a
// send announces itself to the receiver's host, by a frame of its own communicator on the host. The receiver matches it
// with a recv, compares both, and grants it; then both ranks give the message to their NcclChannel, in the order of
// grants. The host waits for no device: a message ends when it is on the channel's stream. A small send ends at once,
// because it is copied to a slot on the device first. If the two sides differ, both get CollectiveMismatch (for a small
// send as TcpMessenger has it). A message that is not granted fails at its deadline, and others go on. A later
// failure ends the channel, and the next grant opens another. The thread that reads frames starts with this rank's
// first message. Thread rule: free-threaded.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "coll/cuda/message_slots.hpp"
#include "coll/cuda/nccl_channel.hpp"
#include "coll/cuda/nccl_message.hpp"
#include "coll/matching.hpp"
#include "coll/messenger.hpp"

namespace zcomm::coll {

class NcclMessenger final : public Messenger, private NcclChannel::Owner {
 public:
  static constexpr std::size_t kEagerNbytes = 16 << 10;
  static constexpr std::size_t kSlots = 64;  ///< of small sends on their way

  /// `host`: a communicator of the same ranks, with no other user, which outlives the messenger. Local.
  NcclMessenger(Communicator& host, std::shared_ptr<net::Mesh> watched, std::shared_ptr<device::Device> device,
                const NcclLibrary& nccl, double timeout_s);
  ~NcclMessenger() override { close(); }

  Work send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call) override;
  Work recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call, int* source) override;
  void close() noexcept override;
  void suspend_deadline(bool suspended);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using MessagePtr = std::shared_ptr<NcclMessage>;

  enum class FrameKind : std::uint32_t { announce, grant, refuse, withdraw, broken, suspend, resume };
  struct Frame {
    FrameKind kind{};
    std::int32_t tag = 0;
    std::uint32_t dtype = 0;
    std::uint32_t from_sender = 0;  ///< of broken: whether the sender's side of the channel tells it
    std::uint64_t id = 0, count = 0, epoch = 0;
    ElementName element{};
    NcclId nccl{};
    char text[264] = {};
  };
  struct Outgoing {
    Frame frame;
    Work work{};
  };
  /// A direction of messages with one peer. A dead epoch has failed on this rank, or was told to have.
  struct Direction {
    std::shared_ptr<NcclChannel> channel;
    std::uint64_t epoch = 0, dead = 0;
    NcclId id{};
  };
  struct Peer {
    Direction out, in;
    std::uint64_t next_id = 1;
    bool is_suspended = false;
    std::exception_ptr complaint;  ///< about a small send that has ended for its caller
  };
  using Messages = Matching<MessagePtr, Frame>;

  MessagePtr make(bool is_send, int peer, int tag, DType dtype, const Call& call);
  void require_open(int peer);
  void start_reader();
  Work finish(Work work, Lock& lock, const Call& call);
  void make_eager(NcclMessage& message, std::uintptr_t stream);

  void read() noexcept;
  bool read_one();
  void look_around();
  void look_at(const MessagePtr& message, Clock::time_point now);
  bool is_suspended(int peer) const;
  std::exception_ptr lost(const NcclMessage& message) const;
  void post(int peer, const Frame& frame);
  void arrive(int peer, const Frame& frame);
  void take(const MessagePtr& recv, int peer, const Frame& head);
  void be_granted(int peer, const Frame& frame);
  void be_refused(int peer, const Frame& frame);
  void be_broken(int peer, const Frame& frame);
  void give_to_channel(const MessagePtr& message, Direction& direction, int peer, bool sends);
  void retire_channel(Direction& direction);
  void complain(int peer, const std::exception_ptr& error);
  std::exception_ptr broken_error(int peer, const std::string& why) const;
  static std::string side_of(const Frame& frame);
  void tell_broken(int peer, bool from_sender, std::uint64_t epoch, const std::string& why);
  std::vector<MessagePtr> waiting() const;
  MessagePtr find_send(int peer, std::uint64_t id) const;
  void end(const MessagePtr& message, const std::exception_ptr& error);
  void end_told(const MessagePtr& message, const std::exception_ptr& error);
  void give_up(const Completion& completion) noexcept;
  Peer& peer_at(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  void message_failed(NcclMessage& message, const std::exception_ptr& error) override;
  void channel_failed(NcclChannel& channel, const std::string& why, bool told) override;

  Communicator& host_;
  const std::shared_ptr<net::Mesh> watched_;
  const std::shared_ptr<device::Device> device_;
  const NcclLibrary& nccl_;
  const WaitTimes times_;
  const std::shared_ptr<MessageFailures> failures_;
  const std::shared_ptr<DeviceLiveness> liveness_;
  TicketPool tickets_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::list<MessagePtr> sends_;  // announced and not granted, in call order
  Messages matching_;
  const std::shared_ptr<MessageSlots> slots_;
  std::list<Outgoing> outgoing_;
  std::vector<std::shared_ptr<NcclChannel>> broken_;  // to be joined
  std::uint32_t last_number_ = 0;
  bool closing_ = false, closed_ = false, suspended_ = false;
  const std::shared_ptr<GiveUp> give_up_;
  CompletionPool completions_{give_up_};
  std::thread reader_;
};

}  // namespace zcomm::coll
