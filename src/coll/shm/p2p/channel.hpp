// ChannelMemory: the shared memory in which two ranks of one host exchange messages.
//
// Each rank owns one segment: its doorbell, then one Channel for each rank that it sends to. All ranks map all
// segments; a page takes memory only once it is used, so pairs that never communicate cost only addresses. [Note:
// doorbell] One number per rank: a peer that has written something for that rank increments it. A rank reads it, looks
// into all its channels, and sleeps until the number changes, so a message that arrives during the look is not missed.
// Invariants: each side of a Ring writes its own line; a record is written before `written` counts it, and not touched
// until `read` counts it. All-zero memory is a valid, empty Channel (it is never constructed). Thread rule: one thread
// at a time on each side of a channel (the messenger's lock); doorbells are free-threaded. Source: coll/signal.hpp for
// the two sides of sleeping.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "coll/messenger.hpp"
#include "coll/signal.hpp"
#include "heap/segment.hpp"
#include "net/mesh.hpp"
#include "zcomm/communicator.hpp"

namespace zcomm::coll {

/// The identity of a message, or of a receive.
struct MessageHeader {
  DType dtype = DType::uint8;
  ElementName element;
  std::int32_t tag = 0;
  std::uint32_t id = 0;     ///< number of its envelope; 0 for a receive
  std::uint64_t count = 0;  ///< elements of the whole list
  char name[48] = {};       ///< cut to fit; for errors only
  char site[48] = {};

  std::size_t nbytes() const { return count * size_of(dtype); }
  bool same_elements(const MessageHeader& other) const {
    return dtype == other.dtype && element == other.element && count == other.count;
  }
};

void set_name(MessageHeader& header, const Call& call);
/// "send float32 count=8 tag=0 to rank 1 'x' at train.py:3"; `peer` -1: any rank.
std::string describe(const MessageHeader& header, bool is_send, int peer);

/// Positions of a ring of records between one writer and one reader, in shared memory.
struct Ring {
  alignas(128) std::atomic<std::uint32_t> written;
  std::atomic<std::uint32_t> stuck;  ///< the writer waits for room and wants to be woken
  alignas(128) std::atomic<std::uint32_t> read;

  /// Writer: whether record `written` may be filled. If not, the reader's next release() returns true.
  bool claim(std::uint32_t capacity) noexcept;
  void commit() noexcept;
  /// Reader: whether record `read` is available.
  bool available() const noexcept {
    return written.load(std::memory_order_acquire) != read.load(std::memory_order_relaxed);
  }
  /// Done with record `read`; true if the writer wants to be woken.
  [[nodiscard]] bool release() noexcept;
};

/// A message as it is announced; a small one travels in it.
struct Envelope {
  static constexpr std::size_t kInlineNbytes = 4096;
  MessageHeader header;
  alignas(128) std::byte payload[kInlineNbytes];
};
inline bool is_inline(const MessageHeader& header) { return header.nbytes() <= Envelope::kInlineNbytes; }

/// The receiver's answer to a message: send the data, or (with a text) the message does not match the receive.
struct Answer {
  std::uint32_t id;
  char mismatch[508];
};

/// Why one side has given the channel up.
struct Breach {
  enum Cause : std::uint32_t { none, late, other };
  std::atomic<std::uint32_t> cause;  ///< written once, after the text
  char what[508];
};

/// From one rank to one other. Data slots follow it in memory.
struct Channel {
  static constexpr std::uint32_t kEnvelopes = 32, kAnswers = 32;  // powers of two, as positions wrap around

  Ring envelopes, slots, answers;  ///< the receiver writes answers, the sender the others
  Breach by_sender, by_receiver;
  Envelope envelope[kEnvelopes];
  Answer answer[kAnswers];
};

class ChannelMemory {
 public:
  /// Collective over `mesh`. `slot_count` is a power of two.
  ChannelMemory(net::Mesh& mesh, std::size_t slot_nbytes, int slot_count, double timeout_s);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(segments_.size()); }
  Channel& channel(int from, int to) const;
  std::byte* slot(Channel& channel, std::uint32_t position) const;
  std::size_t slot_nbytes() const { return slot_nbytes_; }
  std::uint32_t slot_count() const { return slot_count_; }
  std::size_t channel_nbytes() const;

  Counter& doorbell(int rank) const;
  /// Wakes `rank`, or keeps it from going to sleep before it has looked again.
  void ring(int rank) const noexcept;

 private:
  int rank_;
  std::size_t slot_nbytes_;
  std::uint32_t slot_count_;
  std::vector<heap::Segment> segments_;
};

}  // namespace zcomm::coll
