// IoEngine: queues block reads and writes of one file and hands back every result.
//
// Implemented by io_uring.cpp (no_io_uring.cpp where liburing is missing) and io_threads.cpp (pread/pwrite pool).
// Thread rule: one thread submits and reaps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

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
  /// Most requests that may be in flight; submit() beyond it is a programming error.
  virtual int depth() const = 0;
  virtual void submit(std::span<const IoRequest> requests) = 0;
  /// Blocks until at least one result is there (if any request is in flight) and returns how many were stored.
  virtual int reap(std::span<IoResult> results) = 0;
};

/// nullptr where io_uring is not built in or the kernel refuses it.
std::unique_ptr<IoEngine> make_io_uring_engine(int depth);
std::unique_ptr<IoEngine> make_thread_engine(int depth);

}  // namespace zcomm::mem
