// Running the messages of one direction of a pair of ranks (coll/cuda/nccl_channel.hpp).
#include "coll/cuda/nccl_channel.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::chrono::milliseconds kLookAgain{10};  // between looks at the stream and at the other rank
constexpr Seconds kDied{0.5}, kLeft{2};              // for messages in which a rank that is lost has done its part
constexpr double kFarewell_s = 2.0;

}  // namespace

std::string describe(const NcclMessage& message) {
  const std::string peer = message.peer < 0 ? "any rank" : text("rank ", message.peer);
  std::string what = text(message.is_send ? "send to " : "recv from ", peer, ", tag ", message.tag, ", ",
                          element_of(message.dtype, message.element), " count=", message.count);
  return *message.site != '\0' ? text(what, " at ", message.site) : what;
}

void MessageFailures::add(const NcclMessage& message, const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  by_number_.emplace(message.number, error);
}

void MessageFailures::throw_if_failed(const Signature& during) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_number_.find(during.sequence);
  if (found != by_number_.end()) std::rethrow_exception(found->second);
}

NcclChannel::NcclChannel(const Ends& ends, std::shared_ptr<device::Device> device, const NcclLibrary& nccl,
                         std::shared_ptr<net::Mesh> watched, double timeout_s, Owner& owner)
    : ends_(ends),
      device_(std::move(device)),
      nccl_(nccl),
      watched_(std::move(watched)),
      timeout_s_(timeout_s),
      owner_(owner),
      comm_(device_, nccl),
      stream_(device_->make_stream()),
      thread_([this] { loop(); }) {}

std::exception_ptr NcclChannel::push(std::shared_ptr<NcclMessage> message) {
  const std::lock_guard lock(mutex_);
  if (failure_) return failure_;
  if (leaves_at_) return std::make_exception_ptr(Error("the communicator is closed"));
  if (queued_.empty() && in_flight_.empty()) since_ = Clock::now();
  queued_.push_back(std::move(message));
  changed_.notify_all();
  return nullptr;
}

void NcclChannel::fail(const std::exception_ptr& error, bool told) {
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  failure_ = error, told_ = told;
  changed_.notify_all();
}

bool NcclChannel::has_failed() const {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

bool NcclChannel::has(const Completion& completion) const {
  const std::lock_guard lock(mutex_);
  const auto is_it = [&](const auto& message) { return message->completion.get() == &completion; };
  return std::any_of(queued_.begin(), queued_.end(), is_it) || std::any_of(in_flight_.begin(), in_flight_.end(), is_it);
}

void NcclChannel::begin_leave(double patience_s) noexcept {
  const std::lock_guard lock(mutex_);
  if (!leaves_at_) leaves_at_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(patience_s));
  changed_.notify_all();
}

void NcclChannel::leave(double patience_s) noexcept {
  begin_leave(patience_s);
  if (thread_.joinable()) thread_.join();
}

void NcclChannel::loop() noexcept {
  std::exception_ptr error;
  try {
    run();
  } catch (...) {
    error = std::current_exception();
  }
  if (error) end_all(error);
  if (error || !comm_.finalize(std::min(kFarewell_s, timeout_s_))) comm_.abort();
  const std::lock_guard lock(mutex_);
  is_over_ = true;
}

/// Until leave(). Throws the failure.
void NcclChannel::run() {
  comm_.init(2, ends_.id, ends_.sends ? 0 : 1, [this] { look(); });
  for (Lock lock(mutex_);;) {
    while (!queued_.empty() && !failure_) {
      in_flight_.push_back(std::move(queued_.front()));
      queued_.pop_front();
      NcclMessage& message = *in_flight_.back();
      lock.unlock();
      launch(message);
      lock.lock();
    }
    lock.unlock();
    look();
    if (comm_.state() == NcclLibrary::kRemoteError) comm_.check(NcclLibrary::kRemoteError, "its kernels");
    lock.lock();
    retire();
    if (leaves_at_ && queued_.empty() && in_flight_.empty()) return;
    const auto wakes = [this] { return !queued_.empty() || failure_; };
    if (in_flight_.empty())
      changed_.wait(lock, [&] { return wakes() || leaves_at_; });
    else
      changed_.wait_for(lock, kLookAgain, wakes);
  }
}

void NcclChannel::launch(NcclMessage& message) {
  const std::size_t size = size_of(message.dtype);
  stream_->wait(message.ticket->ready());
  void* data = message.pieces.empty() ? nullptr : message.pieces[0].data;
  if (message.pieces.size() > 1) {  // the other rank's pieces may be others
    message.copy = device_->allocate(message.count * size);
    data = message.copy.get();
  }
  const auto copy_pieces = [&] {
    auto* at = static_cast<std::byte*>(data);
    for (const Buffer& piece : message.pieces) {
      const std::size_t nbytes = piece.count * size;
      message.is_send ? stream_->copy(at, piece.data, nbytes) : stream_->copy(piece.data, at, nbytes);
      at += nbytes;
    }
  };
  if (message.is_send && message.pieces.size() > 1) copy_pieces();
  if (message.count > 0)
    comm_.group(
        [&](NcclLibrary::Comm native) {
          void* const stream = reinterpret_cast<void*>(stream_->native());
          const int dtype = nccl_dtype(message.dtype), other = ends_.sends ? 1 : 0;
          if (message.is_send)
            comm_.check(nccl_.send(data, message.count, dtype, other, native, stream), "ncclSend");
          else
            comm_.check(nccl_.recv(data, message.count, dtype, other, native, stream), "ncclRecv");
        },
        [this] { look(); });
  if (!message.is_send && message.pieces.size() > 1) copy_pieces();
  stream_->record(message.ticket->end());
  std::shared_ptr<Completion> completion;
  {
    const std::lock_guard lock(mutex_);
    message.is_launched = true;
    completion = std::move(message.completion);
  }
  if (completion) completion->finish(nullptr, message.ticket);
}

/// Throws if the channel cannot continue.
void NcclChannel::look() {
  const auto now = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    retire();
    if (queued_.empty() && in_flight_.empty()) return;
    if (leaves_at_ && now >= *leaves_at_)
      throw Error(text("communicator was closed while ", oldest(), " was under way"));
    if (suspended_) since_ = now;
    if (now - since_ >= Seconds(timeout_s_)) {
      const bool waits = !in_flight_.empty() && !in_flight_.front()->ticket->ready().done();
      throw Timeout(text(oldest(), " was not complete within ", timeout_s_, " s",
                         waits ? "; work before it on this rank's stream has not ended" : ""));
    }
  }
  look_at_peer(now);
}

void NcclChannel::look_at_peer(Clock::time_point now) {
  const net::Fate fate = watched_->fate(ends_.peer);
  if (fate == net::Fate::alive) return;
  if (!lost_since_) lost_since_ = now;
  if (now - *lost_since_ < (fate == net::Fate::died ? kDied : kLeft)) return;
  const std::lock_guard lock(mutex_);
  throw PeerLost(ends_.peer, text(net::describe(net::Loss{ends_.peer, fate}), "; ", oldest(), " cannot finish"));
}

/// Forgets the messages that have ended on the device.
void NcclChannel::retire() {
  while (!in_flight_.empty() && in_flight_.front()->is_launched && in_flight_.front()->ticket->end().done()) {
    in_flight_.pop_front();
    since_ = Clock::now();
  }
}

std::string NcclChannel::oldest() const {
  if (!in_flight_.empty()) return describe(*in_flight_.front());
  return queued_.empty() ? text("a message with rank ", ends_.peer) : describe(*queued_.front());
}

void NcclChannel::end_all(const std::exception_ptr& error) noexcept {
  std::deque<std::shared_ptr<NcclMessage>> all;
  bool told = false;
  {
    const std::lock_guard lock(mutex_);
    failure_ = error;
    told = told_;
    try {
      retire();
    } catch (...) {  // the device is lost
    }
    all = std::exchange(in_flight_, {});
    all.insert(all.end(), queued_.begin(), queued_.end());
    queued_.clear();
  }
  for (const auto& message : all) owner_.message_failed(*message, error);
  comm_.abort();
  std::string why = "an unknown error";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    why = known.what();
  } catch (...) {
  }
  owner_.channel_failed(*this, why, told);
}

}  // namespace zcomm::coll
