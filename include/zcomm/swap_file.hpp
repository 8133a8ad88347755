// SwapFile: tensors by key on NVMe, asynchronous, checked (decision D7).
//
// A SwapFile lives in its own subdirectory of `directory` (mode 0700: manifest with the owner's pid, lock, data file).
// Space is preallocated: ENOSPC comes at reserve(), not in step 900. Every completion is examined (error, short,
// EAGAIN) and each tile's crc32c is compared when it is read back. The directory is removed by close(); what a killed
// run left is recognised (its lock is free) and removed by the next start in the same `directory`.
// Thread rule: free-threaded. Operations on one key run in call order; memory must stay valid until the Work is done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "zcomm/work.hpp"

namespace zcomm {

class SwapFile {
 public:
  enum class Engine { automatic, io_uring, threads };
  struct Options {
    std::size_t nbytes = 0;              ///< preallocated at once; 0: grows by reserve()
    Engine engine = Engine::automatic;   ///< io_uring where it works, threads otherwise
    std::size_t block_nbytes = 1 << 20;  ///< size of one I/O request
    int depth = 16;                      ///< requests in flight
    bool direct = true;                  ///< O_DIRECT where the file system has it (said in stats().direct)
    bool checksum = true;
  };
  struct Stats {
    std::uint64_t read_nbytes, written_nbytes;
    double read_s, write_s;         ///< time with at least one read (write) in flight
    std::uint64_t reserved_nbytes;  ///< extents in use
    std::uint64_t file_nbytes;
    std::uint64_t error_count, retry_count;
    bool direct;
    std::string engine;           ///< "io_uring" or "threads"
    std::string path;             ///< of the data file
    std::uint64_t bounce_nbytes;  ///< memory held for unaligned heads and tails
  };

  /// Throws SystemError (ENOSPC with path, bytes needed and bytes free; EACCES; ENOENT).
  static std::unique_ptr<SwapFile> open(const std::string& directory, Options options);
  virtual ~SwapFile() = default;

  /// Gives `key` an extent of nbytes (preallocated); no-op if it has one of that size. One of another size is replaced
  /// and its data are gone; InvalidArgument while operations on the key are in flight. Throws SystemError (ENOSPC).
  virtual void reserve(const std::string& key, std::size_t nbytes) = 0;
  /// Forgets `key` and gives its extent back. InvalidArgument if unknown or while operations on it are in flight.
  virtual void release(const std::string& key) = 0;
  /// Queues data -> disk. Reserves the key if need be. InvalidArgument if the key has another size.
  virtual Work write(const std::string& key, const void* data, std::size_t nbytes) = 0;
  /// Queues disk -> data. InvalidArgument for an unknown key or another size; DataCorrupt from wait().
  virtual Work read(const std::string& key, void* data, std::size_t nbytes) = 0;
  /// Waits for all queued operations (the file stays usable after an error); throws the first error that no Work
  /// reported yet.
  virtual void wait() = 0;
  virtual Stats stats() const = 0;
  /// Waits, closes and removes the directory; later calls throw InvalidArgument. Errors that nobody asked for with
  /// wait() are dropped with the data. Idempotent; in a forked child it only lets go. The destructor calls it.
  virtual void close() = 0;
};

}  // namespace zcomm
