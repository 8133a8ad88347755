// SwapQueue: operations queued for the I/O thread: bounded, in order per key, reused.
//
// Invariants: an operation is ready when it is the oldest of its key; it is retired exactly once; pending() counts
// pushed operations that are not yet retired. A permit is a place in the queue, acquired before any other lock (push
// never blocks). Thread rule: push side any thread; try_pop, sleep, awake, retire and fail_all only the I/O thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "mem/io/io_engine.hpp"
#include "mem/stripes.hpp"
#include "zcomm/work.hpp"

namespace zcomm::mem {

struct SwapOperation;

/// The state of one key.
struct SwapEntry {
  const std::string* key = nullptr;  ///< in the owner's map
  KeyExtents extents;                ///< in the data files
  std::size_t nbytes = 0;
  bool written = false;  ///< a write was queued (lock of SwapFile)

  bool valid = false;                    ///< the last write succeeded (I/O thread)
  std::vector<std::uint32_t> checksums;  ///< of each block (I/O thread)

  SwapOperation *oldest = nullptr, *newest = nullptr;  ///< pending operations (lock of SwapQueue)
};

struct SwapOperation {
  bool write = false;
  bool active = false;
  SwapEntry* entry = nullptr;
  std::byte* data = nullptr;
  std::shared_ptr<Completion> completion;
  SwapOperation *next_of_key = nullptr, *next_ready = nullptr;

  std::size_t next_block = 0, block_count = 0;  // I/O thread
  int in_flight = 0;                            // blocks, and checksums still to be computed
  std::exception_ptr error;
};

class SwapQueue {
 public:
  /// `engine` is only woken, and never after refuse().
  SwapQueue(IoEngine& engine, std::size_t limit) : engine_(engine), limit_(limit) {}

  /// Blocks while `limit` operations are pending. Throws the error of refuse().
  void acquire_permit();
  void release_permit();
  /// Consumes a permit, also if it throws the error of refuse().
  Work push(SwapEntry& entry, bool write, std::byte* data);
  bool idle(const SwapEntry& entry) const;
  /// Blocks until nothing is pending.
  void drain();
  /// Throws the oldest failure that no Work has reported; it then counts as reported.
  void rethrow_unreported();
  /// The I/O thread ends when all operations are done.
  void stop();

  /// The oldest ready read (write), or nullptr.
  SwapOperation* try_pop(bool write);
  /// True: nothing is ready, and the next push wakes the engine. False: try again.
  bool sleep();
  void awake();
  bool finished() const;
  /// Finishes the operation with its `error`; the next one of the key becomes ready.
  void retire(SwapOperation& operation);
  /// Refuses new operations from now on; no wake() follows.
  void refuse(std::exception_ptr error);
  /// Ends every pending operation with the error of refuse().
  void fail_all();

 private:
  struct ReadyList {
    SwapOperation *first = nullptr, *last = nullptr;
  };
  void make_ready(SwapOperation& operation);
  void finish(SwapOperation& operation, std::exception_ptr error);
  void keep_failure(std::shared_ptr<Completion> completion);

  IoEngine& engine_;
  const std::size_t limit_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t permits_ = 0;  // acquired: pending operations and those about to be pushed
  std::size_t pending_ = 0;
  bool sleeping_ = false, stopping_ = false;
  std::exception_ptr refusal_;
  ReadyList ready_[2];  // reads, writes
  std::vector<std::unique_ptr<SwapOperation>> operations_;
  std::vector<SwapOperation*> spare_;
  std::vector<std::shared_ptr<Completion>> failures_;
  CompletionPool completions_;
};

}  // namespace zcomm::mem
