// IoEngine: queues block reads and writes of one file and returns every result.
//
// Implemented by io_uring.cpp (which uses the kernel's rings through kernel_ring.hpp) and io_threads.cpp (pread/pwrite
// pool, if the kernel refuses io_uring). Invariant: a request is returned exactly once, also when submit() threw; until
// then its memory belongs to the engine. The destructor ends requests in flight without returning them. Thread rule:
// one thread submits and reaps; wake() may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace zcomm::mem {

struct IoRequest {
  bool write;
  int fd;
  std::byte* data;
  std::size_t nbytes;
  std::uint64_t offset;
  void* user;  ///< returned with the result
};

struct IoResult {
  void* user;
  std::int64_t result;  ///< bytes moved, or -errno
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual const char* name() const = 0;
  /// Maximum number of requests in flight; submit() beyond it is a programming error.
  virtual int depth() const = 0;
  /// Throws SystemError when the engine itself is broken (a request's own failure is its result).
  virtual void submit(std::span<const IoRequest> requests) = 0;
  /// Blocks until a result is available or wake() was called since the last reap(); returns how many were stored.
  virtual int reap(std::span<IoResult> results) = 0;
  /// The available results; never blocks.
  virtual int poll(std::span<IoResult> results) = 0;
  /// Makes the running reap(), or the next one, return early.
  virtual void wake() noexcept = 0;
};

/// Returns nullptr and sets `why` if the kernel refuses io_uring.
std::unique_ptr<IoEngine> make_io_uring_engine(int depth, std::string* why = nullptr);
std::unique_ptr<IoEngine> make_thread_engine(int depth);

}  // namespace zcomm::mem
