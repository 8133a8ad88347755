// SwapRunner: the I/O thread that owns the engine: cuts operations into blocks, keeps `depth` of them in flight and
// examines every completion (decision D7).
//
// [Note: bounce] O_DIRECT needs aligned memory, lengths and offsets. Aligned blocks move directly from the caller's
// memory. Others, and the tail beyond the last 4 KiB of an extent (which is padded to 4 KiB), go through the slot's own
// bounce buffer. A second, buffered descriptor would leave dirty pages next to direct I/O; this does not. Short results
// are resumed at the last aligned byte: re-writing a few bytes is harmless.
// [Note: checksums] No checksum delays a drive's next request: a block is summed once it has moved, after the next
// requests were submitted. A sum before a write reads memory concurrently with the drive, which cost more on a virtual
// drive (docs/internals/measurements.md). Only if few requests are in flight it is computed before the write, so that a
// single write does not wait for it. An operation ends when all of its blocks have moved and are summed.
// [Note: reads first] Blocks of reads go before blocks of writes, down to the single block; every kReadsPerWrite-th is
// a write while one waits, so that write-back continues under any load of reads.
// [Note: life of a block] step() runs these in order: fill() passes retried slots (again_) and new ones (next_slot(),
// prepare()) to the engine; complete() takes one result: advance() says whether the block has moved, failed or is
// submitted again; finish_block() copies a bounced read out and queues a checksum (owe_check(), check_one());
// free_slot(). Each part of an operation ends in end_part(), the last one in end_if_done(), which returns the operation
// to the queue. Thread rule: start(), stop() and counters() from outside; everything else runs on the I/O thread.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "mem/extents.hpp"
#include "mem/io/io_engine.hpp"
#include "mem/latency.hpp"
#include "mem/ring.hpp"
#include "mem/stripes.hpp"
#include "mem/swap_queue.hpp"
#include "zcomm/swap_file.hpp"

namespace zcomm::mem {

class SwapRunner {
 public:
  struct Drive {
    int fd;
    std::string path;
  };
  struct Target {
    std::vector<Drive> drives;
    std::size_t alignment;         ///< of offsets and lengths; 1 when buffered
    std::size_t memory_alignment;  ///< 1 when buffered
    std::size_t block_nbytes;
    bool checksum;
  };
  struct Counters {
    std::uint64_t moved_nbytes[2];  ///< read, written
    double busy_s[2];               ///< with at least one read (write) in flight
    SwapFile::Latency latency[2];
    std::uint64_t error_count, retry_count, bounce_nbytes, bounced_nbytes;
  };

  SwapRunner(std::unique_ptr<IoEngine> engine, Target target, std::size_t queue_limit);
  ~SwapRunner() { stop(); }

  SwapQueue& queue() { return queue_; }
  const char* engine_name() const { return engine_name_; }
  /// Finishes all queued operations and ends the thread. Idempotent.
  void stop();
  Counters counters() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct FreeDeleter {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  /// One request in flight.
  struct Slot {
    SwapOperation* operation = nullptr;
    std::size_t index = 0;  // of the block
    Block block{};
    std::size_t io_nbytes = 0, moved = 0;  // block.nbytes padded to the alignment; done so far
    bool bounced = false, summed = false;
    int retries = 0;
    Clock::time_point since{};  // submitted
    std::unique_ptr<std::byte[], FreeDeleter> bounce;
    std::size_t bounce_nbytes = 0;
  };
  /// A block to be summed; counts as in flight.
  struct Check {
    SwapOperation* operation;
    std::size_t index;  // of the block
  };
  /// Bytes moved by one kind of request, and the time with at least one of them in flight; written by the I/O thread.
  struct Meter {
    void begin(Clock::time_point now);
    void end(Clock::time_point now);
    /// Includes the current period.
    Clock::duration busy() const;

    std::atomic<std::uint64_t> moved_nbytes{0};
    LatencyHistogram latency;

   private:
    int in_flight = 0;
    mutable std::mutex mutex;  // taken when the number in flight leaves or reaches 0
    Clock::time_point since{};
    Clock::duration before{};
    bool open = false;
  };

  void run();
  bool step();
  void fill();
  void submit_batch();
  Slot* next_slot();
  SwapOperation* current(bool write);
  bool begin(SwapOperation& operation);
  void prepare(Slot& slot, SwapOperation& operation);
  IoRequest request_of(Slot& slot) const;
  std::byte* buffer_of(const Slot& slot) const;
  void provide_bounce(Slot& slot);
  void complete(Slot& slot, std::int64_t result);
  /// The effect of one result on its block: the rest is submitted again, it has moved, or it has failed.
  enum class Advance { again, moved, failed };
  Advance advance(Slot& slot, std::int64_t result, std::exception_ptr& error);
  bool retry(Slot& slot);
  void finish_block(Slot& slot);
  void owe_check(SwapOperation& operation, std::size_t index);
  void check_one();
  void end_part(SwapOperation& operation);
  void free_slot(Slot& slot);
  void fail(SwapOperation& operation, std::exception_ptr error);
  void end_if_done(SwapOperation& operation);
  Block block_of(const SwapOperation& operation, std::size_t index) const;
  Location location(const SwapOperation& operation, std::size_t begin) const;
  Location location(const Slot& slot) const;
  const std::string& path_of(const Location& at) const { return target_.drives[at.drive].path; }
  std::string where(const SwapOperation& operation, const Location& at, std::size_t nbytes) const;
  void die(std::exception_ptr error) noexcept;

  std::unique_ptr<IoEngine> engine_;
  const char* engine_name_;
  const Target target_;
  SwapQueue queue_;
  std::vector<Slot> slots_;
  std::vector<Slot*> free_, again_;
  std::vector<IoRequest> batch_;
  std::size_t batch_nbytes_ = 0;
  std::vector<IoResult> results_;
  Ring<Check> checks_;
  std::array<SwapOperation*, 2> current_{};  // the read and the write that the next blocks belong to
  int overtaken_ = 0;                        // reads begun while a write has been waiting
  Clock::duration backoff_{};                // delay before retries are submitted
  std::array<Meter, 2> meters_;              // read, write
  std::atomic<std::uint64_t> error_count_{0}, retry_count_{0}, bounce_nbytes_{0}, bounced_nbytes_{0};
  std::thread thread_;
};

}  // namespace zcomm::mem
