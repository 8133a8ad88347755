// Sends and receives in flight (coll/shm/p2p/transfer.hpp).
#include "coll/shm/p2p/transfer.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/notices.hpp"

namespace zcomm::coll {

void Transfer::start(Stage first_stage, int with, int* report_source) {
  stage = first_stage, peer = with, source = report_source;
  moved = 0, buffer_ = 0, offset_ = 0;
  clock.start(Clock::now());
  done = false, error = nullptr;
}

void Transfer::got_on(Clock::time_point now) {
  if (clock.has_warned()) post_notice(text(describe(*this), " went on after ", clock.waited_s(now), " s"));
  clock.start(now);
}

template <class Copy>
void Transfer::walk(std::size_t length, const Copy& copy) {
  moved += length;
  for (std::size_t at = 0; at < length;) {
    const Buffer& buffer = buffers_[buffer_];
    const std::size_t part = std::min(length - at, buffer.count - offset_);
    if (part > 0) copy(static_cast<std::byte*>(buffer.data) + offset_, at, part);
    at += part, offset_ += part;
    if (offset_ == buffer.count) ++buffer_, offset_ = 0;
  }
}

void Transfer::copy_to(std::byte* place, std::size_t length, AdaptiveStore& writer) {
  walk(length, [&](const std::byte* mine, std::size_t at, std::size_t part) { writer.write(place + at, mine, part); });
}

void Transfer::copy_from(const std::byte* place, std::size_t length) {
  const device::Stores stores = result_stores(nbytes);
  walk(length,
       [&](std::byte* mine, std::size_t at, std::size_t part) { device::copy(mine, place + at, part, stores); });
}

std::string describe(const Transfer& transfer) { return describe(transfer.header, transfer.is_send(), transfer.peer); }

Transfer& TransferPool::take() {
  if (free_.empty()) grow();
  Transfer& transfer = *free_.back();
  free_.pop_back();
  return transfer;
}

void TransferPool::grow() {
  free_.reserve(all_.size() + kWarm);  // give_back() must not throw
  for (std::size_t i = 0; i < kWarm; ++i) {
    all_.push_back(std::make_unique<Transfer>());
    all_.back()->buffers_.reserve(kWarm);
    free_.push_back(all_.back().get());
  }
}

void TransferPool::give_back(Transfer& transfer) {
  transfer.error = nullptr;
  free_.push_back(&transfer);
}

void TransferPool::finish(Transfer& transfer, std::exception_ptr error) noexcept {
  transfer.done = true;
  if (!error && transfer.clock.has_warned()) transfer.got_on(Clock::now());
  transfer.error = std::move(error);
  if (!transfer.completion) {
    ++finished_;
    return;
  }
  --in_flight_;
  const std::shared_ptr<Completion> completion = std::move(transfer.completion);
  completion->finish(std::move(transfer.error));
  give_back(transfer);
}

}  // namespace zcomm::coll
