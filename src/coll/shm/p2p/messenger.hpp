// ShmMessenger: send and recv between ranks of one host, over shared memory.
//
// [Note: waiters progress] There is one lock, and no thread owns progress: a thread that waits looks into all channels
// (MessageProgress::pass), moves data of any message that can proceed, and sleeps on this rank's doorbell when none
// can. So a blocking call runs on its own thread with no hand-off; asynchronous messages have a thread that does the
// same while any is in flight. No thread sleeps longer than 50 ms without a check for lost ranks and deadlines. Thread
// rule: free-threaded; destroyed only when no call is inside.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "coll/messenger.hpp"
#include "coll/shm/p2p/progress.hpp"

namespace zcomm::coll {

class ShmMessenger final : public Messenger {
 public:
  /// Collective over `mesh`.
  ShmMessenger(std::shared_ptr<net::Mesh> mesh, const HostMemory& host, const WaitTimes& times);
  ~ShmMessenger() override { close(); }

  Work send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call) override;
  Work recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call, int* source) override;
  void close() noexcept override;

  /// Of the channels that this rank has sent through.
  std::size_t nbytes() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  Lock enter();
  Work end(Transfer& transfer, bool async, Lock& lock);
  Work go_on_alone(Transfer& transfer);
  void warm_up();
  void wait(Transfer& transfer, Lock& lock);
  void step(const Transfer* mine, Lock& lock);
  void wake_others(const Transfer* mine);
  void loop() noexcept;
  void give_up(const Completion& completion) noexcept;

  std::shared_ptr<net::Mesh> mesh_;
  MessageProgress progress_;
  Counter& doorbell_;
  const Patience patience_;
  int callback_ = -1;

  mutable std::mutex mutex_;
  std::atomic<int> entering_{0};  // callers that want the lock
  const std::shared_ptr<GiveUp> give_up_;
  CompletionPool completions_{give_up_};
  Clock::time_point next_look_{};
  bool closing_ = false;
  std::condition_variable started_;  // something asynchronous is in flight
  std::thread thread_;
};

}  // namespace zcomm::coll
