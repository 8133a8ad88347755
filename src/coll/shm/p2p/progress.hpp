// MessageProgress: the senders and receivers of one rank. Starts messages, moves data, and ends messages that cannot
// proceed.
//
// Invariants: each message ends: by its data, by an answer, or when look_around() finds a peer lost, a channel given
// up, or the deadline passed (counted from the message's last progress). Data that a peer left before it ended are
// received first. A message that fails does not affect the collectives; one that ends half way breaks its channel.
// Thread rule: everything under the messenger's lock; nothing here waits.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "coll/shm/control_block.hpp"
#include "coll/shm/p2p/receiver.hpp"
#include "coll/shm/p2p/sender.hpp"

namespace zcomm::coll {

class MessageProgress {
 public:
  /// Collective over `mesh`. `host` records which ranks have closed and which have suspended the deadline.
  MessageProgress(std::shared_ptr<net::Mesh> mesh, const HostMemory& host, const WaitTimes& times);

  /// Starts a message; it may be done at once. Throws PeerLost, CollectiveMismatch (of an earlier, small message), or
  /// the failure that has closed the channel to `dst`.
  Transfer& send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call);
  Transfer& recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call, int* source);

  /// Moves all data that can move, at most one slot per channel. True if anything moved.
  bool pass();
  /// Ends messages that cannot proceed; returns the next deadline.
  Clock::time_point look_around(Clock::time_point now);
  /// Ends one message for a reason of this rank's own.
  void cancel(Transfer& transfer, Breach::Cause cause, const std::string& what, const std::exception_ptr& error);
  void end_all(const ErrorOf& error_of);
  /// The transfer in flight that `completion` ends; null if it has ended.
  Transfer* find(const Completion& completion) const;

  TransferPool& pool() { return pool_; }
  const ChannelMemory& memory() const { return memory_; }
  std::size_t nbytes() const;

 private:
  Sender& sender(int peer) { return senders_[static_cast<std::size_t>(peer)]; }
  Receiver& receiver(int peer) { return receivers_[static_cast<std::size_t>(peer)]; }
  bool concerns(int peer);
  bool pass(int peer);
  void throw_late_mismatch(int peer);
  void look_at(int peer);
  void end_posted(int peer, const ErrorOf& error_of);
  void end_peer(int peer, const ErrorOf& error_of);
  bool shows_life(const Transfer& transfer) const;
  void look_at_late(Transfer& transfer, Clock::time_point now);
  template <class Function>
  void each(const Function& function) const;
  bool is_gone(int peer) const { return !why_gone(peer).empty(); }
  std::string why_gone(int peer) const;
  bool is_suspended(int peer) const;
  std::string state_of(int peer) const;
  std::string late_message(const Transfer& transfer, bool has_ended) const;

  std::shared_ptr<net::Mesh> mesh_;
  const HostMemory& host_;
  const int rank_, world_size_;
  const WaitTimes times_;
  ChannelMemory memory_;
  TransferPool pool_;
  ShmMatching matching_;
  std::vector<Sender> senders_;  // by rank; this rank's entry is not used
  std::vector<Receiver> receivers_;
  std::vector<Transfer*> some_;  // scratch
  int turn_ = 0;
};

}  // namespace zcomm::coll
