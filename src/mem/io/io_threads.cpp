// Thread engine: a pool of pread/pwrite threads, for systems that refuse io_uring (many containers do).
//
// Same rules as the ring: bounded, every result returned once. A thread waits in the kernel for one request, so there
// are as many threads as requests may be in flight, up to kMaxThreads. Thread rule: see io_engine.hpp.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "mem/io/io_engine.hpp"
#include "mem/io/io_thread.hpp"
#include "mem/ring.hpp"

namespace zcomm::mem {
namespace {

constexpr int kMaxThreads = 32;

class ThreadEngine final : public IoEngine {
 public:
  explicit ThreadEngine(int depth)
      : depth_(depth), requests_(static_cast<std::size_t>(depth)), results_(static_cast<std::size_t>(depth)) {
    threads_.reserve(kMaxThreads);
    try {
      for (int i = 0; i < std::min(depth, kMaxThreads); ++i)
        threads_.push_back(start_io_thread("zcomm-io", [this] { serve(); }));
    } catch (...) {
      stop();
      throw;
    }
  }

  ~ThreadEngine() override { stop(); }

  const char* name() const override { return "threads"; }
  int depth() const override { return depth_; }

  void submit(std::span<const IoRequest> requests) override {
    const std::lock_guard lock(mutex_);
    if (in_flight_ + requests.size() > requests_.capacity())
      throw Error(text("thread engine: more than ", depth_, " requests in flight"));
    for (const IoRequest& request : requests) requests_.push(request);
    in_flight_ += requests.size();
    if (requests.size() == 1) {
      has_request_.notify_one();
    } else {
      has_request_.notify_all();
    }
  }

  int reap(std::span<IoResult> results) override {
    std::unique_lock lock(mutex_);
    has_result_.wait(lock, [this] { return results_.size() > 0 || woken_; });
    woken_ = false;
    return take(results);
  }

  int poll(std::span<IoResult> results) override {
    const std::lock_guard lock(mutex_);
    return take(results);
  }

  void wake() noexcept override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    has_result_.notify_one();
  }

 private:
  int take(std::span<IoResult> results) {
    int count = 0;
    while (count < static_cast<int>(results.size()) && results_.size() > 0) {
      results[static_cast<std::size_t>(count++)] = results_.pop();
      --in_flight_;
    }
    return count;
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      has_request_.wait(lock, [this] { return stopping_ || requests_.size() > 0; });
      if (stopping_) return;
      const IoRequest request = requests_.pop();
      lock.unlock();
      const auto offset = static_cast<off_t>(request.offset);
      const ssize_t moved = request.write ? ::pwrite(request.fd, request.data, request.nbytes, offset)
                                          : ::pread(request.fd, request.data, request.nbytes, offset);
      const std::int64_t result = moved < 0 ? -errno : moved;
      lock.lock();
      results_.push({request.user, result});
      has_result_.notify_one();
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      has_request_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  int depth_;
  std::mutex mutex_;
  std::condition_variable has_request_, has_result_;
  Ring<IoRequest> requests_;
  Ring<IoResult> results_;
  std::size_t in_flight_ = 0;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(int depth) { return std::make_unique<ThreadEngine>(depth); }

}  // namespace zcomm::mem
