// io_uring engine: one ring, one submitter, an eventfd polled through the ring so that wake() ends a wait.
//
// SINGLE_ISSUER and DEFER_TASKRUN where the kernel takes them (6.1): completions are then worked off only while we
// wait. Such a ring belongs to the thread that enables it, so it starts disabled and is enabled at its first use.
// Thread rule: see io_engine.hpp. Source: io_uring_setup(2), liburing's examples.
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/unique_fd.hpp"
#include "mem/io_engine.hpp"

// Older liburing headers lack the names; the numbers are the kernel's ABI.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace zcomm::mem {
namespace {

constexpr int kSubmitRetries = 1000;  // one second in all
constexpr auto kSubmitBackoff = std::chrono::microseconds(100);

class IoUringEngine final : public IoEngine {
 public:
  static std::unique_ptr<IoEngine> make(int depth, std::string* why) {
    std::unique_ptr<IoUringEngine> engine(new IoUringEngine(depth));
    std::string refusal = engine->set_up();
    if (refusal.empty()) return engine;
    if (why != nullptr) *why = std::move(refusal);
    return nullptr;
  }

  ~IoUringEngine() override {
    if (!ring_made_) return;
    // Memory of requests in flight belongs to the kernel: wait for them, the ring's exit does not.
    IoResult dropped[16];
    try {
      while (in_flight_ > 0) reap(dropped);
    } catch (...) {  // the ring is broken; its exit cancels what it can
    }
    ::io_uring_queue_exit(&ring_);
  }

  const char* name() const override { return "io_uring"; }
  int depth() const override { return depth_; }

  void submit(std::span<const IoRequest> requests) override {
    enable();
    for (const IoRequest& request : requests) {
      io_uring_sqe* sqe = next_sqe();
      const auto nbytes = static_cast<unsigned>(request.nbytes);
      if (request.write) {
        ::io_uring_prep_write(sqe, request.fd, request.data, nbytes, request.offset);
      } else {
        ::io_uring_prep_read(sqe, request.fd, request.data, nbytes, request.offset);
      }
      ::io_uring_sqe_set_data(sqe, request.user);
    }
    in_flight_ += static_cast<int>(requests.size());
    try {
      flush();
    } catch (...) {  // what did not go out never comes back: the destructor must not wait for it
      in_flight_ -= static_cast<int>(::io_uring_sq_ready(&ring_));
      throw;
    }
  }

  int reap(std::span<IoResult> results) override {
    enable();
    if (!poll_armed_) arm_poll();
    io_uring_cqe* cqe = nullptr;
    int code = 0;
    do code = ::io_uring_wait_cqe(&ring_, &cqe);
    while (code == -EINTR || code == -EAGAIN);
    if (code < 0) throw_system_error(-code, "io_uring: waiting for completions");
    return take(results);
  }

  int poll(std::span<IoResult> results) override {
    enable();
    // Deferred completions are worked off in the kernel only. The system call itself: see enable().
    if (deferred_ && ::syscall(__NR_io_uring_enter, ring_.ring_fd, 0, 0, IORING_ENTER_GETEVENTS, nullptr, 0) < 0 &&
        errno != EINTR && errno != EAGAIN && errno != EBUSY)
      throw_system_error(errno, "io_uring: looking for completions");
    return take(results);
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);  // full counter: awake anyway
  }

 private:
  explicit IoUringEngine(int depth) : depth_(depth) {}

  int take(std::span<IoResult> results) {
    io_uring_cqe* cqe = nullptr;
    int count = 0;
    while (count < static_cast<int>(results.size()) && ::io_uring_peek_cqe(&ring_, &cqe) == 0) {
      if (::io_uring_cqe_get_data(cqe) == this) {
        drain_wakes();
      } else {
        results[static_cast<std::size_t>(count++)] = {::io_uring_cqe_get_data(cqe), cqe->res};
        --in_flight_;
      }
      ::io_uring_cqe_seen(&ring_, cqe);
    }
    return count;
  }

  /// Empty on success, or why not.
  std::string set_up() {
    wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) return text("eventfd: ", std::strerror(errno));
    if (const int code = try_once(); code < 0) return refusal(-code);
    const auto entries = static_cast<unsigned>(depth_ + 1);
    const unsigned modes[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED, 0u};
    int code = 0;
    for (const unsigned flags : modes) {
      code = ::io_uring_queue_init(entries, &ring_, flags);
      if (code != 0) continue;
      ring_made_ = true;
      enabled_ = flags == 0;
      deferred_ = flags != 0;
      break;
    }
    if (!ring_made_) return refusal(-code);
    io_uring_probe* probe = ::io_uring_get_probe_ring(&ring_);
    const bool able = probe != nullptr && ::io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                      ::io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
    if (probe != nullptr) ::io_uring_free_probe(probe);
    return able ? std::string() : "the kernel's io_uring has no plain reads and writes (5.6), or does not tell";
  }

  /// A request that does nothing, on a ring of its own: a filter may allow the ring and refuse its use.
  static int try_once() {
    io_uring ring{};
    int code = ::io_uring_queue_init(1, &ring, 0);
    if (code < 0) return code;
    ::io_uring_prep_nop(::io_uring_get_sqe(&ring));
    do code = ::io_uring_submit_and_wait(&ring, 1);
    while (code == -EINTR);
    ::io_uring_queue_exit(&ring);
    return code;
  }

  static std::string refusal(int code) {
    const char* hint = "";
    if (code == EPERM || code == EACCES) hint = " (a container's seccomp filter, or sysctl kernel.io_uring_disabled)";
    if (code == ENOSYS) hint = " (a kernel or a seccomp filter without it)";
    if (code == ENOMEM) hint = " (RLIMIT_MEMLOCK, ulimit -l, before Linux 5.12)";
    return text("the kernel refuses it: ", std::strerror(code), hint);
  }

  void enable() {
    if (enabled_) return;
    // The system call itself: the shared liburing of some distributions does not export its wrapper.
    if (::syscall(__NR_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0) < 0)
      throw_system_error(errno, "io_uring: enabling the ring");
    enabled_ = true;
  }

  io_uring_sqe* next_sqe() {
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    if (sqe == nullptr) throw Error(text("io_uring: more than ", depth_, " requests in flight"));
    return sqe;
  }

  void flush() {
    for (int attempt = 0; ::io_uring_sq_ready(&ring_) > 0; ++attempt) {
      const int code = ::io_uring_submit(&ring_);
      if (code >= 0) continue;
      const bool passing = code == -EINTR || code == -EAGAIN || code == -EBUSY;  // short of memory for a moment
      if (!passing || attempt >= kSubmitRetries) throw_system_error(-code, "io_uring: submitting requests");
      std::this_thread::sleep_for(kSubmitBackoff * std::min(attempt, 10));
    }
  }

  void arm_poll() {
    io_uring_sqe* sqe = next_sqe();
    ::io_uring_prep_poll_add(sqe, wake_.get(), POLLIN);
    ::io_uring_sqe_set_data(sqe, this);
    flush();
    poll_armed_ = true;
  }

  void drain_wakes() {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof count);
    poll_armed_ = false;  // a poll fires once
  }

  int depth_;
  UniqueFd wake_;
  io_uring ring_{};
  bool ring_made_ = false;
  bool enabled_ = false;
  bool deferred_ = false;
  bool poll_armed_ = false;
  int in_flight_ = 0;
};

}  // namespace

std::unique_ptr<IoEngine> make_io_uring_engine(int depth, std::string* why) { return IoUringEngine::make(depth, why); }

}  // namespace zcomm::mem
