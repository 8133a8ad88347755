// Points between streams, and waiting for them (coll/cuda/ticket.hpp).
#include "coll/cuda/ticket.hpp"

#include <algorithm>
#include <chrono>

#include "base/error.hpp"
#include "base/interrupt.hpp"

namespace zcomm::coll {
namespace {

constexpr double kSlice_s = 0.05;
constexpr std::chrono::milliseconds kLastWords{500};  // for work on the device of a rank that died
constexpr std::size_t kStreams = 64;                  // torch has 32 per priority

}  // namespace

/// One wait: its deadline, and any failure meanwhile.
struct DeviceLiveness::Look {
  Clock::time_point deadline;
  std::exception_ptr failure = nullptr;
};

device::Stream& DeviceLiveness::caller_stream(std::uintptr_t native) {
  for (const auto& [handle, stream] : streams_)
    if (handle == native) return *stream;
  if (streams_.size() == kStreams) streams_.clear();
  streams_.emplace_back(native, device_->adopt_stream(native));
  return *streams_.back().second;
}

void DeviceLiveness::record(std::uintptr_t stream, device::Event& event) {
  const std::lock_guard lock(mutex_);
  caller_stream(stream).record(event);
}

void DeviceLiveness::copy(std::uintptr_t stream, void* dst, const void* src, std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  caller_stream(stream).copy(dst, src, nbytes);
}

void DeviceLiveness::order(std::uintptr_t stream, device::Event& event, const Signature& during) {
  if (!event.done() && failure(during)) wait(event, during);
  throw_if_spoiled(during);
  {
    const std::lock_guard lock(mutex_);
    device::Stream& caller = caller_stream(stream);
    if (!caller.is_host()) return caller.wait(event);
  }
  wait(event, during);
}

void DeviceLiveness::wait(device::Event& event, const Signature& during) {
  if (event.done()) return throw_if_spoiled(during);
  Look look{Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_))};
  while (!event.wait_for(kSlice_s)) look_around(look, during);
  throw_if_spoiled(during);
}

bool DeviceLiveness::wait_for(device::Event& event, double patience_s, const Signature& during) {
  if (event.wait_for(patience_s)) return throw_if_spoiled(during), true;
  if (!closing_ && !failure(during)) return false;
  wait(event, during);
  return true;
}

void DeviceLiveness::look_around(Look& look, const Signature& during) {
  if (closing_) {
    if (const auto known = failure(during)) std::rethrow_exception(known);
    throw Error(text("communicator was closed while ", describe(during), " was on the device"));
  }
  check_interrupt();
  if (!look.failure && (look.failure = failure(during)))
    look.deadline = std::min(look.deadline, Clock::now() + kLastWords);
  if (Clock::now() < look.deadline) return;
  if (look.failure) std::rethrow_exception(look.failure);
  if (suspended_) return;
  throw Timeout(text(describe(during), " (operation ", during.sequence, "): rank ", rank_, " waited ", timeout_s_,
                     " s for ", device_->name(),
                     " to finish it; all ranks have entered it, but a stream that it comes after, or the device, has "
                     "not come so far"));
}

/// The failure of any rank; an event that this rank waits for may then never happen.
std::exception_ptr DeviceLiveness::failure(const Signature& during) {
  const std::lock_guard lock(failures_mutex_);
  try {
    if (failures_ != nullptr) failures_->throw_if_failed(during);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void DeviceLiveness::throw_if_spoiled(const Signature& during) {
  const std::lock_guard lock(failures_mutex_);
  if (failures_ != nullptr) failures_->throw_if_spoiled(during);
}

void DeviceLiveness::detach() noexcept {
  const std::lock_guard lock(failures_mutex_);
  failures_ = nullptr;
}

void Ticket::called(std::uintptr_t stream) noexcept {
  const std::lock_guard lock(lives_);
  stream_ = stream;
  ordered_ = false;
  failed_ = nullptr;
  try {
    liveness_->record(stream, *ready_);
  } catch (...) {
    failed_ = std::current_exception();
  }
}

device::Event& Ticket::ready() {
  if (failed_) std::rethrow_exception(failed_);
  return *ready_;
}

void Ticket::order(std::optional<std::uintptr_t> stream) {
  const Use use{lives_};
  ordered_ = true;
  liveness_->order(stream.value_or(stream_), *end_, signature);
}

bool Ticket::wait_for(double patience_s) {
  const Use use{lives_};
  return liveness_->wait_for(*end_, patience_s, signature);
}

void Ticket::drop() noexcept {
  if (ordered_) return;
  try {
    order(std::nullopt);
  } catch (...) {  // the communicator's next call throws it
  }
}

bool Ticket::done() noexcept {
  const Use use{lives_};
  try {
    return end_->done();
  } catch (...) {
    return true;  // its error is wait()'s
  }
}

void TicketPool::prepare(Operation& operation, const Call& call) noexcept {
  operation.tail = nullptr;
  if (!moves_data(operation.signature.kind) && operation.signature.kind != OpKind::barrier) return;
  try {
    operation.tail = called(call.stream);
  } catch (...) {  // the device creates no new events: of() throws the error
  }
}

std::shared_ptr<Ticket> TicketPool::called(std::uintptr_t stream) {
  auto ticket = take();
  ticket->called(stream);
  return ticket;
}

std::shared_ptr<Ticket> TicketPool::of(const Operation& operation) const {
  if (operation.tail) return std::static_pointer_cast<Ticket>(operation.tail);
  const std::string& name = liveness_->device().name();
  static_cast<void>(liveness_->device().make_event());  // throws the error of that time
  throw CudaError(text(describe(operation.signature), ": ", name, " gave no event for it"));
}

std::shared_ptr<Ticket> TicketPool::take() {
  const std::lock_guard lock(mutex_);
  for (std::size_t tried = 0; tried < all_.size(); ++tried) {
    const auto& candidate = all_[next_];
    next_ = (next_ + 1) % all_.size();
    if (candidate.use_count() == 1) return candidate;
  }
  all_.push_back(std::make_shared<Ticket>(liveness_));
  return all_.back();
}

}  // namespace zcomm::coll
