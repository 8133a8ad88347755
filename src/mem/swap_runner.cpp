#include "mem/swap_runner.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "mem/io/crc32c.hpp"
#include "mem/io/io_thread.hpp"

namespace zcomm::mem {
namespace {

constexpr int kMaxRetries = 100;               // of one block without progress; then its error is real
constexpr std::size_t kBatchNbytes = 1 << 20;  // submit while the next blocks are prepared
constexpr std::size_t kChecksPerSlot = 4;      // pending checksums; beyond it no block starts
constexpr std::size_t kFewInFlight = 4;        // requests, including this one: then one more read of memory is cheap
constexpr auto kBackoff = std::chrono::microseconds(50);

}  // namespace

SwapRunner::SwapRunner(std::unique_ptr<IoEngine> engine, Target target, std::size_t queue_limit)
    : engine_(std::move(engine)),
      engine_name_(engine_->name()),
      target_(std::move(target)),
      queue_(*engine_, queue_limit),
      slots_(static_cast<std::size_t>(engine_->depth())),
      results_(slots_.size()),
      checks_(kChecksPerSlot * slots_.size()) {
  free_.reserve(slots_.size());
  again_.reserve(slots_.size());
  batch_.reserve(slots_.size());
  for (Slot& slot : slots_) free_.push_back(&slot);
  thread_ = start_io_thread("zcomm-swap", [this] { run(); });
}

void SwapRunner::stop() {
  if (!thread_.joinable()) return;
  queue_.stop();
  thread_.join();
}

SwapRunner::Counters SwapRunner::counters() const {
  Counters counters{};
  for (std::size_t kind = 0; kind < 2; ++kind) {
    counters.moved_nbytes[kind] = meters_[kind].moved_nbytes.load(std::memory_order_relaxed);
    counters.latency[kind] = meters_[kind].latency.summary();
    counters.busy_s[kind] = std::chrono::duration<double>(meters_[kind].busy()).count();
  }
  counters.error_count = error_count_.load(std::memory_order_relaxed);
  counters.retry_count = retry_count_.load(std::memory_order_relaxed);
  counters.bounce_nbytes = bounce_nbytes_.load(std::memory_order_relaxed);
  counters.bounced_nbytes = bounced_nbytes_.load(std::memory_order_relaxed);
  return counters;
}

void SwapRunner::Meter::begin(Clock::time_point now) {
  if (in_flight++ > 0) return;
  const std::lock_guard lock(mutex);
  since = now;
  open = true;
}

void SwapRunner::Meter::end(Clock::time_point now) {
  if (--in_flight > 0) return;
  const std::lock_guard lock(mutex);
  before += now - since;
  open = false;
}

SwapRunner::Clock::duration SwapRunner::Meter::busy() const {
  const std::lock_guard lock(mutex);
  return open ? before + (Clock::now() - since) : before;
}

void SwapRunner::run() {
  try {
    while (step()) {
    }
  } catch (...) {
    die(std::current_exception());
  }
}

bool SwapRunner::step() {
  fill();
  if (queue_.finished()) return false;
  int count = 0;
  if (checks_.size() > 0) {
    count = engine_->poll(results_);
    if (count == 0) check_one();
  } else {
    // With no slot free a new operation could not start, so only a result wakes the thread.
    if (!free_.empty() && !queue_.sleep()) return true;
    count = engine_->reap(results_);
    queue_.awake();
  }
  for (int i = 0; i < count; ++i) {
    const IoResult& result = results_[static_cast<std::size_t>(i)];
    complete(*static_cast<Slot*>(result.user), result.result);
  }
  return true;
}

void SwapRunner::fill() {
  if (backoff_ > Clock::duration::zero()) std::this_thread::sleep_for(std::exchange(backoff_, Clock::duration::zero()));
  for (Slot* slot : again_) {
    batch_.push_back(request_of(*slot));
    batch_nbytes_ += batch_.back().nbytes;
  }
  again_.clear();
  while (Slot* slot = next_slot()) {
    batch_.push_back(request_of(*slot));
    batch_nbytes_ += batch_.back().nbytes;
    if (batch_nbytes_ >= kBatchNbytes) submit_batch();
  }
  submit_batch();
}

void SwapRunner::submit_batch() {
  if (!batch_.empty()) engine_->submit(batch_);
  batch_.clear();
  batch_nbytes_ = 0;
}

SwapRunner::Slot* SwapRunner::next_slot() {
  // Each request in flight may add a check when it completes.
  if (free_.empty() || checks_.size() + slots_.size() - free_.size() >= checks_.capacity()) return nullptr;
  SwapOperation *read = current(false), *write = current(true);
  if (read == nullptr && write == nullptr) return nullptr;
  const bool writes = read == nullptr || (write != nullptr && overtaken_ + 1 >= SwapFile::kReadsPerWrite);
  overtaken_ = writes || write == nullptr ? 0 : overtaken_ + 1;
  SwapOperation& operation = writes ? *write : *read;
  Slot* slot = free_.back();
  free_.pop_back();
  prepare(*slot, operation);
  if (operation.next_block == operation.block_count) current_[writes ? 1 : 0] = nullptr;
  return slot;
}

/// The operation of one kind that issues the next blocks; nullptr: none is ready.
SwapOperation* SwapRunner::current(bool write) {
  SwapOperation*& current = current_[write ? 1 : 0];
  while (current == nullptr) {
    SwapOperation* operation = queue_.try_pop(write);
    if (operation == nullptr) return nullptr;
    if (begin(*operation)) current = operation;
  }
  return current;
}

/// False if the operation ended at once.
bool SwapRunner::begin(SwapOperation& operation) {
  SwapEntry& entry = *operation.entry;
  operation.block_count = block_count(entry.nbytes, target_.block_nbytes, target_.alignment);
  if (operation.write) {
    entry.valid = false;  // until all of it is on disk
  } else if (!entry.valid) {
    operation.block_count = 0;
    fail(operation, std::make_exception_ptr(
                        DataCorrupt(EIO, text("SwapFile: key '", *entry.key, "' holds no data, its last write failed"),
                                    target_.drives[entry.extents.first].path)));
  }
  if (operation.block_count > 0) return true;
  end_if_done(operation);
  return false;
}

void SwapRunner::prepare(Slot& slot, SwapOperation& operation) {
  slot.operation = &operation;
  slot.index = operation.next_block++;
  slot.block = block_of(operation, slot.index);
  slot.io_nbytes = static_cast<std::size_t>(round_up(slot.block.nbytes, target_.alignment));
  slot.moved = 0;
  slot.retries = 0;
  std::byte* data = operation.data + slot.block.begin;
  slot.bounced =
      slot.io_nbytes != slot.block.nbytes || reinterpret_cast<std::uintptr_t>(data) % target_.memory_alignment != 0;
  if (slot.bounced) provide_bounce(slot);
  slot.summed = operation.write && target_.checksum && slots_.size() - free_.size() <= kFewInFlight;
  if (slot.summed) owe_check(operation, slot.index);
  if (operation.write && slot.bounced) {
    std::memcpy(slot.bounce.get(), data, slot.block.nbytes);
    std::memset(slot.bounce.get() + slot.block.nbytes, 0, slot.io_nbytes - slot.block.nbytes);
  }
  ++operation.in_flight;
  slot.since = Clock::now();
  meters_[operation.write ? 1 : 0].begin(slot.since);
}

void SwapRunner::provide_bounce(Slot& slot) {
  bounced_nbytes_.fetch_add(slot.block.nbytes, std::memory_order_relaxed);
  if (slot.bounce_nbytes >= slot.io_nbytes) return;
  // Two sizes only, so that memory stops growing: a tail, or a whole block.
  const std::size_t nbytes = slot.io_nbytes <= kExtentAlign ? kExtentAlign : target_.block_nbytes;
  slot.bounce.reset(static_cast<std::byte*>(std::aligned_alloc(kExtentAlign, nbytes)));
  if (slot.bounce == nullptr) throw SystemError(ENOMEM, text("SwapFile: no memory for a bounce buffer of ", nbytes));
  bounce_nbytes_.fetch_add(nbytes - slot.bounce_nbytes, std::memory_order_relaxed);
  slot.bounce_nbytes = nbytes;
}

std::byte* SwapRunner::buffer_of(const Slot& slot) const {
  return slot.bounced ? slot.bounce.get() : slot.operation->data + slot.block.begin;
}

Block SwapRunner::block_of(const SwapOperation& operation, std::size_t index) const {
  return block_at(index, operation.entry->nbytes, target_.block_nbytes, target_.alignment);
}

/// A block lies on one drive: block and stripe have the same size.
Location SwapRunner::location(const SwapOperation& operation, std::size_t begin) const {
  return Stripes::locate(operation.entry->extents, begin, target_.block_nbytes);
}

Location SwapRunner::location(const Slot& slot) const {
  Location location = this->location(*slot.operation, slot.block.begin);
  location.offset += slot.moved;
  return location;
}

IoRequest SwapRunner::request_of(Slot& slot) const {
  const Location to = location(slot);
  return {slot.operation->write,
          target_.drives[to.drive].fd,
          buffer_of(slot) + slot.moved,
          slot.io_nbytes - slot.moved,
          to.offset,
          &slot};
}

std::string SwapRunner::where(const SwapOperation& operation, const Location& at, std::size_t nbytes) const {
  return text("SwapFile: ", operation.write ? "write" : "read", " of key '", *operation.entry->key, "' at offset ",
              at.offset, " of ", path_of(at), " (", nbytes, " bytes): ");
}

bool SwapRunner::retry(Slot& slot) {
  retry_count_.fetch_add(1, std::memory_order_relaxed);
  if (++slot.retries > kMaxRetries) return false;
  // Time for the system to recover, spent once for all retries.
  if (slot.retries > 3) backoff_ = std::max<Clock::duration>(backoff_, kBackoff * slot.retries);
  again_.push_back(&slot);
  return true;
}

void SwapRunner::complete(Slot& slot, std::int64_t result) {
  std::exception_ptr error;
  switch (advance(slot, result, error)) {
    case Advance::again:
      return;
    case Advance::moved:
      finish_block(slot);
      break;
    case Advance::failed:
      fail(*slot.operation, std::move(error));
      break;
  }
  free_slot(slot);
}

/// Applies one result to its block. failed: `error` has the cause.
SwapRunner::Advance SwapRunner::advance(Slot& slot, std::int64_t result, std::exception_ptr& error) {
  const bool write = slot.operation->write;
  const std::size_t remaining = slot.io_nbytes - slot.moved;
  const auto message = [&](const auto&... why) {
    return text(where(*slot.operation, location(slot), slot.io_nbytes - slot.moved), why...);
  };
  const auto failure = [&](int code, const auto&... why) {
    error = std::make_exception_ptr(SystemError(code, message(why...), path_of(location(slot))));
    return Advance::failed;
  };
  const auto damage = [&](const auto&... why) {
    error = std::make_exception_ptr(DataCorrupt(EIO, message(why...), path_of(location(slot))));
    return Advance::failed;
  };
  if (result < 0 && result != -EAGAIN && result != -EINTR) {
    const int code = static_cast<int>(-result);
    return failure(code, std::strerror(code), " (errno ", code, ")");
  }
  if (result > 0 && static_cast<std::uint64_t>(result) > remaining) return failure(EIO, result, " bytes reported");
  if (result == static_cast<std::int64_t>(remaining)) return Advance::moved;
  if (result == 0 && !write) return damage("unexpected end of file");
  if (result > 0) {
    const std::size_t aligned = static_cast<std::size_t>(result) / target_.alignment * target_.alignment;
    slot.moved += aligned;
    if (aligned > 0) slot.retries = 0;
  }
  if (retry(slot)) return Advance::again;
  if (result > 0 && !write) return damage("the file ends ", result, " bytes further on");
  const int code = result < 0 ? static_cast<int>(-result) : EIO;
  return failure(code, "no progress in ", kMaxRetries, " tries, the last returned ", result, " (errno ", code, ")");
}

void SwapRunner::finish_block(Slot& slot) {
  SwapOperation& operation = *slot.operation;
  Meter& meter = meters_[operation.write ? 1 : 0];
  meter.latency.record(Clock::now() - slot.since);
  meter.moved_nbytes.fetch_add(slot.block.nbytes, std::memory_order_relaxed);
  if (!operation.write && slot.bounced)
    std::memcpy(operation.data + slot.block.begin, slot.bounce.get(), slot.block.nbytes);
  if (target_.checksum && !slot.summed) owe_check(operation, slot.index);
}

void SwapRunner::owe_check(SwapOperation& operation, std::size_t index) {
  checks_.push({&operation, index});
  ++operation.in_flight;
}

void SwapRunner::check_one() {
  const auto [operation, index] = checks_.pop();
  const Block block = block_of(*operation, index);
  std::uint32_t& known = operation->entry->checksums[index];
  const std::uint32_t is = operation->error ? known : crc32c(operation->data + block.begin, block.nbytes);
  if (operation->write) {
    known = is;
  } else if (is != known) {
    const Location at = location(*operation, block.begin);
    fail(*operation, std::make_exception_ptr(DataCorrupt(
                         EIO,
                         text(where(*operation, at, block.nbytes), "data read back differ from the data written",
                              std::hex, ", crc32c 0x", is, " instead of 0x", known),
                         path_of(at))));
  }
  end_part(*operation);
}

void SwapRunner::free_slot(Slot& slot) {
  SwapOperation& operation = *slot.operation;
  meters_[operation.write ? 1 : 0].end(Clock::now());
  slot.operation = nullptr;
  free_.push_back(&slot);
  end_part(operation);
}

/// A block has moved, or has been summed.
void SwapRunner::end_part(SwapOperation& operation) {
  --operation.in_flight;
  end_if_done(operation);
}

/// An operation's first error is its error; no further blocks start, and it ends once the blocks in flight complete.
void SwapRunner::fail(SwapOperation& operation, std::exception_ptr error) {
  if (!operation.error) {
    operation.error = std::move(error);
    error_count_.fetch_add(1, std::memory_order_relaxed);
  }
  operation.block_count = operation.next_block;
  for (SwapOperation*& current : current_)
    if (current == &operation) current = nullptr;
}

void SwapRunner::end_if_done(SwapOperation& operation) {
  if (operation.in_flight > 0 || operation.next_block < operation.block_count) return;
  if (operation.write && !operation.error) operation.entry->valid = true;
  queue_.retire(operation);
}

/// The engine itself failed: requests in flight may never complete, so it is destroyed before the operations end.
void SwapRunner::die(std::exception_ptr error) noexcept {
  queue_.refuse(std::move(error));
  engine_.reset();
  queue_.fail_all();
}

}  // namespace zcomm::mem
