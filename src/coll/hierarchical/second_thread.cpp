// See second_thread.hpp.
#include "coll/hierarchical/second_thread.hpp"

#include <chrono>

#include "base/interrupt.hpp"

namespace zcomm::coll {
namespace {
constexpr std::chrono::milliseconds kLook{50};  // between looks at signals
}

SecondThread::~SecondThread() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    given_ = done_;
  }
  given_changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void SecondThread::begin() {
  const std::lock_guard lock(mutex_);
  given_ = done_ = 0;
  error_ = nullptr;
}

void SecondThread::give() {
  {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    ++given_;
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  given_changed_.notify_one();
}

void SecondThread::wait(std::size_t count) {
  std::unique_lock lock(mutex_);
  while (!done_changed_.wait_for(lock, kLook, [&] { return done_ >= count || error_; })) {
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
  if (done_ < count) std::rethrow_exception(error_);
}

void SecondThread::drain() noexcept {
  std::unique_lock lock(mutex_);
  given_ = done_ + (runs_ ? 1 : 0);
  done_changed_.wait(lock, [this] { return !runs_; });
  given_ = done_;
}

std::exception_ptr SecondThread::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void SecondThread::loop() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    given_changed_.wait(lock, [this] { return stops_ || done_ < given_; });
    if (stops_) return;
    runs_ = true;
    const std::size_t step = done_;
    lock.unlock();
    std::exception_ptr error;
    try {
      run_(step);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) {
      error_ = error;
      given_ = done_;
      lock.unlock();
      failed_();
      lock.lock();
    } else {
      ++done_;
    }
    runs_ = false;
    done_changed_.notify_all();
  }
}

}  // namespace zcomm::coll
