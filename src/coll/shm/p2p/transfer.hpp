// Transfer: one send or receive in flight, and the pool of transfers.
//
// Invariants: a Transfer is finished exactly once. An asynchronous one then returns to the pool; a blocking call
// returns its own, once it finds `done`. Pooled ones keep their vectors, so that a warm pool allocates nothing. Thread
// rule: under the messenger's lock.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "coll/late_clock.hpp"
#include "coll/matching.hpp"
#include "coll/messenger.hpp"
#include "coll/shm/adaptive_store.hpp"
#include "coll/shm/p2p/channel.hpp"
#include "zcomm/work.hpp"

namespace zcomm::coll {

struct Transfer {
  /// Of a send: waits for an envelope; announced to the receiver; sends its data. Of a receive: unmatched; receives its
  /// data.
  enum class Stage { queued, announced, sending, posted, receiving };

  Stage stage = Stage::queued;
  int peer = -1;  ///< of a receive from any rank: -1 until matched
  MessageHeader header;
  int* source = nullptr;
  std::size_t nbytes = 0, moved = 0;
  LateClock clock;  ///< since its last progress
  std::shared_ptr<Completion> completion;
  bool done = false;
  std::exception_ptr error;

  bool is_send() const { return stage <= Stage::sending; }
  std::size_t left() const { return nbytes - moved; }
  template <class Buffers>
  void set(const Buffers& buffers, DType dtype, int tag, const Call& call) {
    header.dtype = dtype, header.tag = tag, header.count = 0;
    buffers_.clear();
    for (const auto& buffer : buffers) {
      // A send's memory is only read: copy_to is all that touches it.
      buffers_.push_back({const_cast<void*>(static_cast<const void*>(buffer.data)), buffer.count * size_of(dtype)});
      header.count += buffer.count;
    }
    nbytes = header.nbytes();
    set_name(header, call);
  }
  void start(Stage first_stage, int with, int* report_source);
  /// The message has progressed: restarts its clock.
  void got_on(Clock::time_point now);
  /// The next `length` bytes of the list, to or from one place.
  void copy_to(std::byte* place, std::size_t length, AdaptiveStore& writer);
  void copy_from(const std::byte* place, std::size_t length);

 private:
  friend class TransferPool;
  template <class Copy>
  void walk(std::size_t length, const Copy& copy);
  std::vector<Buffer> buffers_;  // counted in bytes
  std::size_t buffer_ = 0, offset_ = 0;
};

/// The error of a transfer that cannot proceed.
using ErrorOf = std::function<std::exception_ptr(const Transfer&)>;

/// Messages are taken from a channel only while a receive waits for one from that rank (wants()), so that a receiver
/// without receives holds up its senders instead of filling its own memory.
using ShmMatching = Matching<Transfer*, MessageHeader>;

/// "send float32 count=8 tag=0 to rank 1"
std::string describe(const Transfer& transfer);

class TransferPool {
 public:
  template <class Buffers>
  Transfer& take(const Buffers& buffers, DType dtype, int tag, const Call& call) {
    Transfer& transfer = take();
    transfer.set(buffers, dtype, tag, call);
    return transfer;
  }
  void give_back(Transfer& transfer);
  void finish(Transfer& transfer, std::exception_ptr error = nullptr) noexcept;

  /// Asynchronous ones, from the moment a completion is attached.
  int in_flight() const { return in_flight_; }
  void add_in_flight() { ++in_flight_; }
  /// The number of blocking calls finished since the last query.
  int take_finished() { return std::exchange(finished_, 0); }

 private:
  Transfer& take();
  void grow();
  std::vector<std::unique_ptr<Transfer>> all_;
  std::vector<Transfer*> free_;
  int in_flight_ = 0, finished_ = 0;
};

}  // namespace zcomm::coll
