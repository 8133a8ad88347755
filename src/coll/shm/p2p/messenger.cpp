// Waiting for messages (coll/shm/p2p/messenger.hpp).
#include "coll/shm/p2p/messenger.hpp"

#include <algorithm>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/interrupt.hpp"

namespace zcomm::coll {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);  // as in coll/shm/liveness.cpp

}  // namespace

ShmMessenger::ShmMessenger(std::shared_ptr<net::Mesh> mesh, const HostMemory& host, const WaitTimes& times)
    : mesh_(mesh),
      progress_(std::move(mesh), host, times),
      doorbell_(progress_.memory().doorbell(host.rank())),
      patience_(Patience::of(host.world_size(), host.cpu_count())),
      give_up_(std::make_shared<GiveUp>([this](const Completion& completion) { give_up(completion); })) {
  callback_ = mesh_->on_loss([this](net::Loss) { progress_.memory().ring(progress_.memory().rank()); });
}

Work ShmMessenger::send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call) {
  Lock lock = enter();
  return end(progress_.send(buffers, dtype, dst, tag, call), call.async, lock);
}

Work ShmMessenger::recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call, int* source) {
  Lock lock = enter();
  return end(progress_.recv(buffers, dtype, src, tag, call, source), call.async, lock);
}

ShmMessenger::Lock ShmMessenger::enter() {
  ++entering_;
  Lock lock(mutex_);
  --entering_;
  if (closing_) throw Error("the communicator is closed");
  return lock;
}

Work ShmMessenger::end(Transfer& transfer, bool async, Lock& lock) {
  wake_others(&transfer);
  if (async && !transfer.done) return go_on_alone(transfer);
  if (!transfer.done) wait(transfer, lock);
  const std::exception_ptr error = std::move(transfer.error);
  progress_.pool().give_back(transfer);
  if (!error) return {};
  if (!async) std::rethrow_exception(error);
  const auto completion = completions_.acquire();
  completion->finish(error);
  return Work(completion);
}

Work ShmMessenger::go_on_alone(Transfer& transfer) {
  if (!thread_.joinable()) {
    try {
      warm_up();
      thread_ = std::thread([this] { loop(); });
    } catch (const std::system_error& error) {
      const std::string what = text(describe(transfer), ": cannot start the messenger's thread");
      progress_.cancel(transfer, Breach::other, what, nullptr);
      progress_.pool().give_back(transfer);
      throw_system_error(error.code().value(), what);
    }
  }
  transfer.completion = completions_.acquire();
  progress_.pool().add_in_flight();
  started_.notify_one();
  return Work(transfer.completion);
}

void ShmMessenger::warm_up() {
  std::vector<std::shared_ptr<Completion>> warm;
  for (std::size_t i = 0; i < kWarm; ++i) warm.push_back(completions_.acquire());
  for (const auto& completion : warm) completion->finish();
}

void ShmMessenger::wait(Transfer& transfer, Lock& lock) {
  auto next_check = Clock::now() + kSlice;
  for (;;) {
    step(&transfer, lock);
    if (transfer.done) return;
    if (Clock::now() < next_check) continue;
    next_check = Clock::now() + kSlice;
    lock.unlock();
    try {
      check_interrupt();
      lock.lock();
    } catch (...) {
      lock.lock();
      if (!transfer.done)
        progress_.cancel(transfer, Breach::other, text(describe(transfer), " was interrupted"),
                         std::current_exception());
      wake_others(&transfer);
      progress_.pool().give_back(transfer);
      throw;
    }
  }
}

void ShmMessenger::step(const Transfer* mine, Lock& lock) {
  const std::uint32_t seen = doorbell_.value.load(std::memory_order_acquire);
  const bool moved = progress_.pass();
  wake_others(mine);
  if (mine != nullptr && mine->done) return;
  const auto now = Clock::now();
  if (!moved || now >= next_look_) {
    const auto deadline = progress_.look_around(now);
    next_look_ = now + kSlice;
    wake_others(mine);
    const bool idle = mine == nullptr ? progress_.pool().in_flight() == 0 : mine->done;
    if (idle) return;
    if (!moved) {
      lock.unlock();
      if (!wait_awake(doorbell_, seen + 1, mine != nullptr ? patience_ : Patience{}))
        wait_asleep(doorbell_, seen + 1, std::min(deadline, Clock::now() + kSlice));
      lock.lock();
      return;
    }
  }
  // A mutex is not fair: a thread that moves much data would keep the others out.
  lock.unlock();
  if (entering_.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
  lock.lock();
}

void ShmMessenger::wake_others(const Transfer* mine) {
  const int own = mine != nullptr && mine->done ? 1 : 0;
  if (progress_.pool().take_finished() > own) progress_.memory().ring(progress_.memory().rank());
}

void ShmMessenger::loop() noexcept {
  Lock lock(mutex_);
  for (;;) {
    started_.wait(lock, [this] { return closing_ || progress_.pool().in_flight() > 0; });
    if (progress_.pool().in_flight() == 0) return;
    step(nullptr, lock);
  }
}

void ShmMessenger::give_up(const Completion& completion) noexcept {
  const std::lock_guard lock(mutex_);
  if (Transfer* const transfer = progress_.find(completion)) {
    const std::string what = text(describe(*transfer), " was given up (interrupted by a signal)");
    progress_.cancel(*transfer, Breach::other, what, std::make_exception_ptr(Error(what)));
  }
  wake_others(nullptr);
  progress_.memory().ring(progress_.memory().rank());
}

void ShmMessenger::close() noexcept {
  give_up_->detach();
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closing_, true)) return;
    progress_.end_all([](const Transfer& transfer) {
      return std::make_exception_ptr(Error(text("communicator was closed while ", describe(transfer), " was running")));
    });
  }
  const ChannelMemory& memory = progress_.memory();
  for (int rank = 0; rank < memory.world_size(); ++rank) memory.ring(rank);
  started_.notify_all();
  if (thread_.joinable()) thread_.join();
  mesh_->forget(callback_);
}

std::size_t ShmMessenger::nbytes() const {
  const std::lock_guard lock(mutex_);
  return progress_.nbytes();
}

}  // namespace zcomm::coll
