// SwapFile: keys and their extents; the runner moves the data (zcomm/swap_file.hpp).
//
// Lock order: a permit of the queue first (it may block), then mutex_, then the queue's own lock. A forked child owns
// nothing of it: its calls fail, and its destructor removes nothing.
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/env.hpp"
#include "base/error.hpp"
#include "mem/extents.hpp"
#include "mem/io/file_copy.hpp"
#include "mem/stripes.hpp"
#include "mem/swap_drives.hpp"
#include "mem/swap_file_impl.hpp"
#include "mem/swap_runner.hpp"

namespace zcomm {
namespace mem {
namespace {

constexpr std::size_t kQueueLimit = 4096;  // operations pending; write() and read() block beyond it
constexpr std::size_t kMaxBlock = std::size_t{1} << 30;
constexpr int kMaxDepth = 4096;
constexpr std::size_t kMaxDrives = 256;

class Permit {
 public:
  explicit Permit(SwapQueue& queue) : queue_(&queue) { queue.acquire_permit(); }
  ~Permit() {
    if (queue_ != nullptr) queue_->release_permit();
  }
  Permit(const Permit&) = delete;
  Permit& operator=(const Permit&) = delete;
  SwapQueue& consume() { return *std::exchange(queue_, nullptr); }

 private:
  SwapQueue* queue_;
};

class SwapFileImpl final : public SwapFile {
 public:
  SwapFileImpl(const std::vector<std::string>& directories, const Options& options, std::unique_ptr<IoEngine> engine,
               std::vector<std::string> notes)
      : options_(options),
        owner_(::getpid()),
        notes_(std::move(notes)),
        drives_(directories, options.direct),
        stripes_(drives_.count(), options.block_nbytes) {
    SwapRunner::Target target{
        {}, drives_.alignment(), drives_.memory_alignment(), options.block_nbytes, options.checksum};
    const std::uint64_t each = preallocation();
    for (std::size_t drive = 0; drive < drives_.count(); ++drive) {
      drives_.grow(drive, each);
      const DataFile& file = drives_.file(drive);
      target.drives.push_back({file.fd(), file.path()});
      if (!file.why_buffered().empty())
        notes_.push_back(text("O_DIRECT is not there for '", directories[drive], "' (", file.why_buffered(),
                              "): swapping goes through the page cache"));
      if (!file.why_named().empty())
        notes_.push_back(text("the data file in '", directories[drive], "' keeps its name (", file.why_named(),
                              "): a killed process leaves its space until the next start there"));
    }
    runner_ = std::make_unique<SwapRunner>(std::move(engine), std::move(target), kQueueLimit);
  }

  ~SwapFileImpl() override {
    try {
      close();
    } catch (...) {  // nothing left to do for a destructor
    }
  }

  void reserve(const std::string& key, std::size_t nbytes) override {
    const std::lock_guard lock(mutex_);
    check_open();
    provide(key, nbytes);
  }

  void release(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    check_open();
    const auto found = entries_.find(key);
    if (found == entries_.end()) throw InvalidArgument(text("SwapFile.release: unknown key '", key, "'"));
    check_idle(found->second, "release");
    stripes_.give_back(found->second.extents, found->second.nbytes);
    entries_.erase(found);
  }

  Work write(const std::string& key, const void* data, std::size_t nbytes) override {
    check_data(data, nbytes, "write", key);
    Permit permit(queue());
    const std::lock_guard lock(mutex_);
    check_open();
    const auto found = entries_.find(key);
    SwapEntry& entry = found == entries_.end() ? provide(key, nbytes) : found->second;
    check_size(entry, nbytes, "write");
    entry.written = true;
    // The engine only reads from written memory.
    return permit.consume().push(entry, true, const_cast<std::byte*>(static_cast<const std::byte*>(data)));
  }

  Work read(const std::string& key, void* data, std::size_t nbytes) override {
    check_data(data, nbytes, "read", key);
    Permit permit(queue());
    const std::lock_guard lock(mutex_);
    check_open();
    const auto found = entries_.find(key);
    if (found == entries_.end()) throw InvalidArgument(text("SwapFile.read: unknown key '", key, "'"));
    check_size(found->second, nbytes, "read");
    if (!found->second.written)
      throw InvalidArgument(text("SwapFile.read: key '", key, "' was reserved, but never written"));
    return permit.consume().push(found->second, false, static_cast<std::byte*>(data));
  }

  std::vector<std::pair<std::string, std::size_t>> written() const override {
    const std::lock_guard lock(mutex_);
    check_open();
    std::vector<std::pair<std::string, std::size_t>> keys;
    for (const auto& [key, entry] : entries_)
      if (entry.written) keys.emplace_back(key, entry.nbytes);
    std::sort(keys.begin(), keys.end());
    return keys;
  }

  void wait() override {
    SwapQueue& pending = queue();
    pending.drain();
    pending.rethrow_unreported();
  }

  Image copy_to(const std::vector<std::string>& files, bool durable) override {
    if (files.size() != drives_.count())
      throw InvalidArgument(text("SwapFile.snapshot: ", files.size(), " files for ", drives_.count(), " drives"));
    std::size_t made = 0;
    try {
      return copy_each([&](std::size_t drive, CopySource from, const std::vector<Range>& ranges, std::uint64_t end) {
        const CopyMethod method = copy_file(from, files[drive], ranges, end, durable);
        ++made;
        return method;
      });
    } catch (...) {
      for (std::size_t drive = 0; drive < made; ++drive) ::unlink(files[drive].c_str());
      throw;
    }
  }

  Image copy_beside(std::vector<int>& files) override {
    std::vector<UniqueFd> made;
    Image image =
        copy_each([&](std::size_t drive, CopySource from, const std::vector<Range>& ranges, std::uint64_t end) {
          const std::string path = drives_.directory(drive).path() + "/" + kCopyName;
          made.push_back(make_nameless(drives_.directory(drive).fd(), kCopyName, path));
          return copy_into(made.back().get(), path, from, ranges, end, false);
        });
    files.reserve(files.size() + made.size());
    for (UniqueFd& each : made) files.push_back(each.release());
    return image;
  }

  Stats stats() const override {
    check_owner();
    const std::lock_guard lock(mutex_);
    const SwapRunner::Counters counters = runner_->counters();
    Stats stats{};
    stats.read_nbytes = counters.moved_nbytes[0];
    stats.written_nbytes = counters.moved_nbytes[1];
    stats.read_s = counters.busy_s[0];
    stats.write_s = counters.busy_s[1];
    stats.reserved_nbytes = stripes_.used_nbytes();
    stats.file_nbytes = drives_.nbytes();
    stats.error_count = counters.error_count;
    stats.retry_count = counters.retry_count;
    stats.direct = drives_.direct();
    stats.engine = runner_->engine_name();
    stats.bounce_nbytes = counters.bounce_nbytes;
    stats.bounced_nbytes = counters.bounced_nbytes;
    stats.read_latency = counters.latency[0];
    stats.write_latency = counters.latency[1];
    stats.paths = drives_.paths();
    stats.path = stats.paths.front();
    stats.notes = notes_;
    return stats;
  }

  void close() override {
    if (::getpid() != owner_) {
      abandon();
      return;
    }
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    runner_->stop();
    drives_.remove();
  }

 private:
  /// Calls copy(drive, source, ranges, length) for each drive, while nothing new is queued.
  template <class Copy>
  Image copy_each(const Copy& copy) {
    const std::lock_guard lock(mutex_);
    check_open();
    queue().drain();
    queue().rethrow_unreported();
    Image image{options_.block_nbytes, drives_.alignment(), {}, {}, written_keys()};
    for (std::size_t drive = 0; drive < drives_.count(); ++drive) {
      const DataFile& from = drives_.file(drive);
      const std::uint64_t end = stripes_.end(drive);
      image.methods.emplace_back(
          name_of(copy(drive, CopySource{from.buffered_fd(), from.path()}, written_ranges(image, drive), end)));
      image.file_nbytes.push_back(end);
    }
    return image;
  }

  std::vector<ImageKey> written_keys() const {
    std::vector<ImageKey> keys;
    for (const auto& [key, entry] : entries_) {
      if (!entry.written) continue;
      if (!entry.valid)
        throw DataCorrupt(EIO, text("SwapFile.snapshot: key '", key, "' holds no data, its last write failed"),
                          drives_.file(entry.extents.first).path());
      keys.push_back({key, entry.nbytes, entry.extents.first, entry.extents.offsets, entry.checksums});
    }
    std::sort(keys.begin(), keys.end(), [](const ImageKey& a, const ImageKey& b) { return a.key < b.key; });
    return keys;
  }

  /// In file order, adjacent ranges joined.
  std::vector<Range> written_ranges(const Image& image, std::size_t drive) const {
    std::vector<Range> ranges;
    for (const ImageKey& key : image.keys) {
      const std::uint64_t nbytes = stripes_.share({key.first, key.offsets}, drive, key.nbytes);
      if (nbytes > 0) ranges.push_back({key.offsets[drive], round_up(nbytes, kExtentAlign)});
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.offset < b.offset; });
    std::size_t last = 0;
    for (std::size_t i = 1; i < ranges.size(); ++i) {
      if (ranges[last].offset + ranges[last].nbytes == ranges[i].offset) {
        ranges[last].nbytes += ranges[i].nbytes;
      } else {
        ranges[++last] = ranges[i];
      }
    }
    if (!ranges.empty()) ranges.resize(last + 1);
    return ranges;
  }

  void check_owner() const {
    if (::getpid() != owner_)
      throw Error(text("SwapFile: opened by process ", owner_, "; a forked child has to open its own"));
  }

  /// Per drive: its share, and one more block, because keys may not divide evenly.
  std::uint64_t preallocation() const {
    if (drives_.count() == 1 || options_.nbytes == 0) return options_.nbytes;
    return round_up((options_.nbytes + drives_.count() - 1) / drives_.count(), kExtentAlign) + options_.block_nbytes;
  }

  SwapQueue& queue() {
    check_owner();
    return runner_->queue();
  }

  void check_open() const {
    check_owner();
    if (closed_) throw InvalidArgument(text("SwapFile: ", drives_.file(0).path(), " is closed"));
  }

  static void check_data(const void* data, std::size_t nbytes, const char* what, const std::string& key) {
    if (data == nullptr && nbytes > 0)
      throw InvalidArgument(text("SwapFile.", what, ": null pointer for ", nbytes, " bytes of key '", key, "'"));
  }

  static void check_size(const SwapEntry& entry, std::size_t nbytes, const char* what) {
    if (entry.nbytes != nbytes)
      throw InvalidArgument(
          text("SwapFile.", what, ": key '", *entry.key, "' has ", entry.nbytes, " bytes, not ", nbytes));
  }

  void check_idle(const SwapEntry& entry, const char* what) {
    if (!queue().idle(entry))
      throw InvalidArgument(
          text("SwapFile.", what, ": key '", *entry.key, "' has operations in flight; wait for them"));
  }

  /// The entry of `key` with an extent of nbytes; an entry of another size is replaced and its data are lost.
  SwapEntry& provide(const std::string& key, std::size_t nbytes) {
    if (nbytes > (std::uint64_t{1} << 62)) throw InvalidArgument(text("SwapFile.reserve: ", nbytes, " bytes"));
    auto known = entries_.find(key);
    if (known != entries_.end()) {
      if (known->second.nbytes == nbytes) return known->second;
      check_idle(known->second, "reserve");
    }
    SwapEntry made;
    made.nbytes = nbytes;
    if (options_.checksum) made.checksums.resize(block_count(nbytes, options_.block_nbytes, drives_.alignment()));
    made.extents = stripes_.take(nbytes);
    try {
      for (std::size_t drive = 0; drive < drives_.count(); ++drive) drives_.grow(drive, stripes_.end(drive));
      if (known == entries_.end()) known = entries_.try_emplace(key).first;
    } catch (...) {
      stripes_.give_back(made.extents, nbytes);
      throw;
    }
    SwapEntry& entry = known->second;
    if (entry.key != nullptr) stripes_.give_back(entry.extents, entry.nbytes);
    made.key = &known->first;
    entry = std::move(made);
    return entry;
  }

  /// After fork the I/O thread exists only in the parent, and locks may be held for ever: touches and frees nothing.
  void abandon() noexcept {
    if (std::exchange(closed_, true)) return;
    [[maybe_unused]] auto* runner = runner_.release();
    drives_.disown();
  }

  const Options options_;
  const pid_t owner_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::vector<std::string> notes_;
  SwapDrives drives_;
  std::unique_ptr<SwapRunner> runner_;
  Stripes stripes_;
  std::unordered_map<std::string, SwapEntry> entries_;  // element addresses are stable
};

void check_options(const SwapFile::Options& options) {
  if (options.block_nbytes == 0 || options.block_nbytes % kExtentAlign != 0 || options.block_nbytes > kMaxBlock)
    throw InvalidArgument(text("SwapFile: block_nbytes ", options.block_nbytes, " is not a multiple of ", kExtentAlign,
                               " up to ", kMaxBlock));
  if (options.depth < 1 || options.depth > kMaxDepth)
    throw InvalidArgument(text("SwapFile: depth ", options.depth, " is not in 1..", kMaxDepth));
}

/// An engine with `depth` requests; `note` names a requested engine that is unavailable.
std::unique_ptr<IoEngine> make_engine(SwapFile::Engine choice, int depth, std::string& note) {
  bool asked = choice != SwapFile::Engine::automatic;
  if (const auto wish = read_env().io; wish && !asked) {
    asked = true;
    choice = *wish == "threads" ? SwapFile::Engine::threads : SwapFile::Engine::io_uring;
  }
  if (choice == SwapFile::Engine::threads) return make_thread_engine(depth);
  std::string why;
  if (auto engine = make_io_uring_engine(depth, &why)) return engine;
  if (asked) throw Unsupported(text("SwapFile: no io_uring, ", why, "; use engine 'threads' or 'auto'"));
  note = text("no io_uring, ", why, ": a pool of threads swaps instead");
  return make_thread_engine(depth);
}

}  // namespace

std::unique_ptr<SwapFile> open_swap_file(const std::vector<std::string>& directories, const SwapFile::Options& options,
                                         std::unique_ptr<IoEngine> engine, std::vector<std::string> notes) {
  check_options(options);
  return std::make_unique<SwapFileImpl>(directories, options, std::move(engine), std::move(notes));
}

}  // namespace mem

std::unique_ptr<SwapFile> SwapFile::open(const std::string& directory, Options options) {
  return open(std::vector<std::string>{directory}, options);
}

std::unique_ptr<SwapFile> SwapFile::open(const std::vector<std::string>& directories, Options options) {
  mem::check_options(options);
  const auto drives = static_cast<int>(std::clamp<std::size_t>(directories.size(), 1, mem::kMaxDrives));
  std::string note;
  auto engine = mem::make_engine(options.engine, std::min(options.depth * drives, mem::kMaxDepth), note);
  std::vector<std::string> notes;
  if (!note.empty()) notes.push_back(std::move(note));
  return mem::open_swap_file(directories, options, std::move(engine), std::move(notes));
}

}  // namespace zcomm
