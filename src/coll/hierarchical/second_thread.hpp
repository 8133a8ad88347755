// SecondThread: carries out the links' part of an operation in steps, concurrently with the host's part.
//
// The first thread, which runs the operation, gives step k when its data is ready, and waits for it before it goes on
// with the results. The thread starts when it is first needed. Invariants: steps run in order, one at a time; after an
// error the remaining steps of the operation are dropped. Thread rule: run() on the second thread, all else on the
// first.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace zcomm::coll {

class SecondThread {
 public:
  /// run(k): step k. failed(): called on the second thread after an error, to end the first thread's waits.
  SecondThread(std::function<void(std::size_t)> run, std::function<void()> failed)
      : run_(std::move(run)), failed_(std::move(failed)) {}
  ~SecondThread();

  /// The first step of an operation will be given next.
  void begin();
  void give();
  /// Until `count` steps have ended; throws their error, and the program's interrupt.
  void wait(std::size_t count);
  /// Until nothing runs; steps that have not begun are dropped.
  void drain() noexcept;
  /// Of the operation; null while all is well.
  std::exception_ptr error() const;

 private:
  void loop() noexcept;

  const std::function<void(std::size_t)> run_;
  const std::function<void()> failed_;
  mutable std::mutex mutex_;
  std::condition_variable given_changed_, done_changed_;
  std::size_t given_ = 0, done_ = 0;
  bool runs_ = false, stops_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace zcomm::coll
