// SwapFile: tensors by key on NVMe, asynchronous, with checksums (decision D7).
//
// A SwapFile has its own subdirectory of `directory` (mode 0700: a lock file that names the owner). The data file has
// no name there, if the file system allows that: its space is freed when the process ends, however it ends. With
// several directories, one per drive, each has a lock and a data file, and the blocks are striped over them. Reads go
// before writes that were queued earlier (of other keys), because the program waits for reads, not for write-backs.
// While a write waits, every kReadsPerWrite-th block is a write. Space is preallocated: ENOSPC is raised by reserve(),
// not in step 900. Every completion is examined (error, short, EAGAIN) and each tile's crc32c is compared when it is
// read back. close() removes the directory; the next start in the same `directory` recognises (by its free lock) and
// removes the directory of a killed run. Thread rule: free-threaded. Operations on one key run in call order; memory
// must stay valid until the Work is done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zcomm/work.hpp"

namespace zcomm {

class SwapFile {
 public:
  enum class Engine { automatic, io_uring, threads };
  struct Options {
    std::size_t nbytes = 0;              ///< preallocated at once, over all directories; 0: grows by reserve()
    Engine engine = Engine::automatic;   ///< io_uring if it works, threads otherwise
    std::size_t block_nbytes = 1 << 20;  ///< size of one I/O request
    int depth = 32;                      ///< requests in flight per directory
    bool direct = true;                  ///< O_DIRECT if the file system supports it (see stats().direct)
    bool checksum = true;
  };
  /// Of single requests, retries included. Percentiles are at most 1/8 too long.
  struct Latency {
    std::uint64_t count;
    double p50_s, p90_s, p99_s, max_s;
  };
  struct Stats {
    std::uint64_t read_nbytes, written_nbytes;
    double read_s, write_s;         ///< time with at least one read (write) in flight
    std::uint64_t reserved_nbytes;  ///< extents in use
    std::uint64_t file_nbytes;
    std::uint64_t error_count, retry_count;
    bool direct;
    std::string engine;            ///< "io_uring" or "threads"
    std::string path;              ///< name under which the (first) data file was opened
    std::uint64_t bounce_nbytes;   ///< memory held for unaligned data
    std::uint64_t bounced_nbytes;  ///< moved through it: unaligned memory, and tails of keys
    Latency read_latency, write_latency;
    std::vector<std::string> paths;  ///< of the data files, one per directory
    std::vector<std::string> notes;  ///< unavailable options with the reason: io_uring, O_DIRECT, a file without a name
  };
  /// One key of an Image. Tile t of tile_nbytes lies in file (first + t) % files, at offsets[that file] + t / files *
  /// tile_nbytes. A checksum for each tile, and one for the rest beyond the last multiple of `alignment`.
  struct ImageKey {
    std::string key;
    std::size_t nbytes;
    std::size_t first;
    std::vector<std::uint64_t> offsets;
    std::vector<std::uint32_t> checksums;  ///< crc32c; empty without Options::checksum
  };
  /// The contents and layout of the files of copy_to().
  struct Image {
    std::size_t tile_nbytes, alignment;
    std::vector<std::uint64_t> file_nbytes;
    std::vector<std::string> methods;  ///< per file: reflink, copy_file_range, read_write
    std::vector<ImageKey> keys;        ///< in order of their names
  };
  static constexpr int kReadsPerWrite = 8;

  /// Throws SystemError (ENOSPC with path, bytes needed and bytes free; EACCES; ENOENT).
  static std::unique_ptr<SwapFile> open(const std::string& directory, Options options);
  /// Striped: a block on each drive in turn. A failure on one drive names that drive's path; all files are removed.
  static std::unique_ptr<SwapFile> open(const std::vector<std::string>& directories, Options options);
  virtual ~SwapFile() = default;

  /// Allocates an extent of nbytes for `key` (preallocated); no-op if it has one of that size. An extent of another
  /// size is replaced and its data are lost; InvalidArgument while operations on the key are in flight. Throws
  /// SystemError (ENOSPC).
  virtual void reserve(const std::string& key, std::size_t nbytes) = 0;
  /// Removes `key` and frees its extent. InvalidArgument if unknown or while operations on it are in flight.
  virtual void release(const std::string& key) = 0;
  /// Queues data -> disk. Reserves the key if needed. InvalidArgument if the key has another size.
  virtual Work write(const std::string& key, const void* data, std::size_t nbytes) = 0;
  /// Queues disk -> data. InvalidArgument for an unknown key or another size; DataCorrupt from wait().
  virtual Work read(const std::string& key, void* data, std::size_t nbytes) = 0;
  /// The keys with a queued or completed write, in order of their names, with their bytes.
  virtual std::vector<std::pair<std::string, std::size_t>> written() const = 0;
  /// Waits for all queued operations (the file stays usable after an error); throws the first error that no Work has
  /// reported yet.
  virtual void wait() = 0;
  /// wait(), then copies the keys that hold data into new files, one per directory, without passing the data through
  /// the caller's memory; if `durable`, they are on disk when it returns. Operations of other threads wait meanwhile.
  /// Throws the errors of wait(), DataCorrupt for a key if its last write failed, SystemError (EEXIST, ENOSPC), and
  /// then removes the files.
  virtual Image copy_to(const std::vector<std::string>& files, bool durable = true) = 0;
  /// The same, not durable, into files without a name on the drives of the data files: they are freed with their last
  /// descriptor. Appends a descriptor per directory to `files`, which the caller closes. Also throws SystemError
  /// (ENOENT) if the directory was removed.
  virtual Image copy_beside(std::vector<int>& files) = 0;
  /// The temporary name of such a copy, next to the data file's.
  static constexpr char kCopyName[] = "copy";
  virtual Stats stats() const = 0;
  /// Waits, closes and removes the directory; later calls throw InvalidArgument. Errors not fetched with wait() are
  /// dropped with the data. Idempotent; in a forked child it only releases its handle. The destructor calls it.
  virtual void close() = 0;
};

}  // namespace zcomm
