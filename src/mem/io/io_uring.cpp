// io_uring engine: one ring, one submitter, an eventfd polled through the ring so that wake() ends a wait.
//
// SINGLE_ISSUER and DEFER_TASKRUN if the kernel supports them (6.1): completions are then processed only while we wait.
// Such a ring belongs to the thread that enables it, so it starts disabled and is enabled at its first use. Invariant:
// a request counts as in flight from submit() until its result is returned, also when submit() throws: requests that
// the kernel did not take then are submitted by the next call, or withdrawn by the destructor. Thread rule: see
// io_engine.hpp. Source: io_uring_setup(2), io_uring_enter(2).
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/unique_fd.hpp"
#include "mem/io/io_engine.hpp"
#include "mem/io/kernel_ring.hpp"

namespace zcomm::mem {
namespace {

using namespace ring_abi;

constexpr int kMaxVainCalls = 1000;  // one second in all
constexpr auto kBackoff = std::chrono::microseconds(100);

/// Bounds the number of consecutive calls without progress.
class Patience {
 public:
  explicit Patience(const char* what) : what_(what) {}

  /// After a call that returned `code`. Throws SystemError when it is a real error, or the last of too many.
  void spend(int code) {
    if (code == -EINTR) return;
    const bool passing = code >= 0 || code == -EAGAIN || code == -EBUSY;  // temporarily short of memory
    if (passing && ++vain_ <= kMaxVainCalls) {
      std::this_thread::sleep_for(kBackoff * std::min(vain_ - 1, 10));
      return;
    }
    if (code < 0) throw_system_error(-code, what_);
    throw SystemError(EIO, text(what_, ": the kernel did nothing in ", kMaxVainCalls, " calls"));
  }
  void renew() { vain_ = 0; }

 private:
  const char* what_;
  int vain_ = 0;
};

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
    while (const Submission* left = ring_.withdraw())
      if (left->user_data != kWakeTag) --in_flight_;
    poll_armed_ = true;  // wake() is not called any more
    // Memory of requests in flight belongs to the kernel: wait for them, the ring's end does not.
    IoResult dropped[16];
    try {
      while (in_flight_ > 0) reap(dropped);
    } catch (...) {  // the ring is broken; closing it cancels the rest
    }
  }

  const char* name() const override { return "io_uring"; }
  int depth() const override { return depth_; }

  void submit(std::span<const IoRequest> requests) override {
    enable();
    if (static_cast<std::size_t>(in_flight_) + requests.size() > static_cast<std::size_t>(depth_))
      throw Error(text("io_uring: more than ", depth_, " requests in flight"));
    for (const IoRequest& request : requests) {
      Submission& entry = add();
      entry.opcode = request.write ? kWrite : kRead;
      entry.fd = request.fd;
      entry.address = reinterpret_cast<std::uintptr_t>(request.data);
      entry.nbytes = static_cast<std::uint32_t>(request.nbytes);
      entry.offset = request.offset;
      entry.user_data = reinterpret_cast<std::uintptr_t>(request.user);
      ++in_flight_;
    }
    Patience patience("io_uring: submitting requests");
    while (const unsigned queued = ring_.queued()) {
      const int code = ring_.enter(0);
      if (ring_.queued() < queued) {
        patience.renew();
      } else {
        patience.spend(code);
      }
    }
  }

  int reap(std::span<IoResult> results) override {
    enable();
    if (!poll_armed_) arm_poll();
    Patience patience("io_uring: waiting for completions");
    while (ring_.peek() == nullptr) {
      const unsigned queued = ring_.queued();
      const int code = ring_.enter(1);
      if (ring_.peek() != nullptr) break;
      if (ring_.queued() < queued) {
        patience.renew();
      } else {
        patience.spend(code);
      }
    }
    return take(results);
  }

  int poll(std::span<IoResult> results) override {
    enable();
    if (deferred_ || ring_.queued() > 0) {
      const int code = ring_.enter(0, true);
      if (code < 0 && code != -EINTR && code != -EAGAIN && code != -EBUSY)
        throw_system_error(-code, "io_uring: looking for completions");
    }
    return take(results);
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);  // full counter: awake anyway
  }

 private:
  static constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};  // not an address: the poll that wake() ends

  explicit IoUringEngine(int depth) : depth_(depth) {}

  int take(std::span<IoResult> results) {
    int count = 0;
    while (count < static_cast<int>(results.size())) {
      const Completion* done = ring_.peek();
      if (done == nullptr) break;
      const Completion completion = *done;
      ring_.pop();
      if (completion.user_data == kWakeTag) {
        drain_wakes(completion.result);
      } else {
        results[static_cast<std::size_t>(count++)] = {reinterpret_cast<void*>(completion.user_data), completion.result};
        --in_flight_;
      }
    }
    return count;
  }

  /// Empty on success, else the reason.
  std::string set_up() {
    wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) return text("eventfd: ", std::strerror(errno));
    if (std::string why = try_once(); !why.empty()) return why;
    const auto entries = static_cast<unsigned>(depth_ + 1);
    int code = 0;
    for (const std::uint32_t flags : {kSetupSingleIssuer | kSetupDeferTaskrun | kSetupDisabled, 0u}) {
      code = ring_.open(entries, flags);
      if (code != 0) continue;
      ring_made_ = true;
      enabled_ = flags == 0;
      deferred_ = flags != 0;
      break;
    }
    if (!ring_made_) return refusal(code);
    if (ring_.supports(kRead, kWrite)) return {};
    return "the kernel's io_uring has no plain reads and writes (5.6), or does not tell";
  }

  /// Tries a no-op request on a ring of its own, because a filter may allow the ring and refuse its use.
  static std::string try_once() {
    KernelRing ring;
    if (const int code = ring.open(1, 0); code != 0) return refusal(code);
    ring.add()->opcode = kNop;
    int code = 0;
    do code = ring.enter(1);
    while (code == -EINTR);
    if (code < 0) return refusal(-code);
    return ring.peek() != nullptr ? std::string() : "the kernel takes requests and does nothing";
  }

  static std::string refusal(int code) {
    const char* hint = "";
    if (code == EPERM || code == EACCES) hint = " (a container's seccomp filter, or sysctl kernel.io_uring_disabled)";
    if (code == ENOSYS) hint = " (a kernel or a seccomp filter without it)";
    if (code == ENOMEM) hint = " (RLIMIT_MEMLOCK, ulimit -l, before Linux 5.12)";
    if (code == EOPNOTSUPP) hint = " (a kernel before Linux 5.6)";
    return text("the kernel refuses it: ", std::strerror(code), hint);
  }

  void enable() {
    if (enabled_) return;
    if (const int code = ring_.enable(); code != 0) throw_system_error(code, "io_uring: enabling the ring");
    enabled_ = true;
  }

  Submission& add() {
    Submission* entry = ring_.add();
    if (entry == nullptr) throw Error(text("io_uring: no room for ", in_flight_, " requests"));
    return *entry;
  }

  /// Queues the poll, which is submitted by the next call that enters the kernel.
  void arm_poll() {
    Submission& entry = add();
    entry.opcode = kPollAdd;
    entry.fd = wake_.get();
    entry.operation_flags = std::endian::native == std::endian::big ? std::uint32_t{POLLIN} << 16 : POLLIN;
    entry.user_data = kWakeTag;
    poll_armed_ = true;
  }

  void drain_wakes(std::int32_t result) {
    poll_armed_ = false;  // a poll fires once
    if (result < 0) throw_system_error(-result, "io_uring: polling for wake()");
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof count);
  }

  int depth_;
  UniqueFd wake_;
  KernelRing ring_;
  bool ring_made_ = false;
  bool enabled_ = false;
  bool deferred_ = false;
  bool poll_armed_ = false;
  int in_flight_ = 0;
};

}  // namespace

std::unique_ptr<IoEngine> make_io_uring_engine(int depth, std::string* why) { return IoUringEngine::make(depth, why); }

}  // namespace zcomm::mem
