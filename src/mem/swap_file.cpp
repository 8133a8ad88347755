// SwapFile: keys and their extents; the moving is the runner's (zcomm/swap_file.hpp).
//
// Locks: a permit of the queue first (it may block), then mutex_, then the queue's own.
// A forked child owns nothing of it: its calls fail, and its destructor removes nothing.
#include <unistd.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "mem/data_file.hpp"
#include "mem/extents.hpp"
#include "mem/swap_directory.hpp"
#include "mem/swap_file_impl.hpp"
#include "mem/swap_runner.hpp"

namespace zcomm {
namespace mem {
namespace {

constexpr std::size_t kQueueLimit = 4096;  // operations pending; write() and read() block beyond it
constexpr std::size_t kMaxBlock = std::size_t{1} << 30;
constexpr int kMaxDepth = 4096;

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
  SwapFileImpl(const std::string& directory, const Options& options, std::unique_ptr<IoEngine> engine)
      : options_(options),
        owner_(::getpid()),
        directory_(std::make_unique<SwapDirectory>(SwapDirectory::create(directory))) {
    file_ =
        std::make_unique<DataFile>(directory_->fd(), kDataName, directory_->path() + "/" + kDataName, options.direct);
    file_->grow(options.nbytes);
    runner_ = std::make_unique<SwapRunner>(
        std::move(engine),
        SwapRunner::Target{file_->fd(), file_->path(), file_->alignment(), file_->memory_alignment(),
                           options.block_nbytes, options.checksum},
        kQueueLimit);
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
    check_idle(*found->second, "release");
    extents_.give_back(found->second->offset, found->second->nbytes);
    entries_.erase(found);
  }

  Work write(const std::string& key, const void* data, std::size_t nbytes) override {
    check_data(data, nbytes, "write", key);
    Permit permit(queue());
    const std::lock_guard lock(mutex_);
    check_open();
    const auto found = entries_.find(key);
    SwapEntry& entry = found == entries_.end() ? provide(key, nbytes) : *found->second;
    check_size(entry, nbytes, "write");
    entry.written = true;
    // The engine only reads from what is written.
    return permit.consume().push(entry, true, const_cast<std::byte*>(static_cast<const std::byte*>(data)));
  }

  Work read(const std::string& key, void* data, std::size_t nbytes) override {
    check_data(data, nbytes, "read", key);
    Permit permit(queue());
    const std::lock_guard lock(mutex_);
    check_open();
    const auto found = entries_.find(key);
    if (found == entries_.end()) throw InvalidArgument(text("SwapFile.read: unknown key '", key, "'"));
    check_size(*found->second, nbytes, "read");
    if (!found->second->written)
      throw InvalidArgument(text("SwapFile.read: key '", key, "' was reserved, but never written"));
    return permit.consume().push(*found->second, false, static_cast<std::byte*>(data));
  }

  void wait() override {
    SwapQueue& pending = queue();
    pending.drain();
    pending.rethrow_unreported();
  }

  Stats stats() const override {
    check_owner();
    const std::lock_guard lock(mutex_);
    const SwapRunner::Counters counters = runner_->counters();
    return {counters.moved_nbytes[0], counters.moved_nbytes[1], counters.busy_s[0],   counters.busy_s[1],
            extents_.used_nbytes(),   file_->nbytes(),          counters.error_count, counters.retry_count,
            file_->direct(),          runner_->engine_name(),   file_->path(),        counters.bounce_nbytes};
  }

  void close() override {
    if (::getpid() != owner_) {
      abandon();
      return;
    }
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    runner_->stop();
    directory_->remove();
  }

 private:
  void check_owner() const {
    if (::getpid() != owner_)
      throw Error(text("SwapFile: opened by process ", owner_, "; a forked child has to open its own"));
  }

  SwapQueue& queue() {
    check_owner();
    return runner_->queue();
  }

  void check_open() const {
    check_owner();
    if (closed_) throw InvalidArgument(text("SwapFile: ", file_->path(), " is closed"));
  }

  static void check_data(const void* data, std::size_t nbytes, const char* what, const std::string& key) {
    if (data == nullptr && nbytes > 0)
      throw InvalidArgument(text("SwapFile.", what, ": null pointer for ", nbytes, " bytes of key '", key, "'"));
  }

  static void check_size(const SwapEntry& entry, std::size_t nbytes, const char* what) {
    if (entry.nbytes != nbytes)
      throw InvalidArgument(
          text("SwapFile.", what, ": key '", entry.key, "' has ", entry.nbytes, " bytes, not ", nbytes));
  }

  void check_idle(const SwapEntry& entry, const char* what) {
    if (!queue().idle(entry))
      throw InvalidArgument(text("SwapFile.", what, ": key '", entry.key, "' has operations in flight; wait for them"));
  }

  /// The entry of `key` with an extent of nbytes; one of another size is replaced, and its data are gone.
  SwapEntry& provide(const std::string& key, std::size_t nbytes) {
    if (nbytes > (std::uint64_t{1} << 62)) throw InvalidArgument(text("SwapFile.reserve: ", nbytes, " bytes"));
    const auto found = entries_.find(key);
    if (found != entries_.end()) {
      if (found->second->nbytes == nbytes) return *found->second;
      check_idle(*found->second, "reserve");
    }
    auto entry = std::make_unique<SwapEntry>();
    entry->key = key;
    entry->nbytes = nbytes;
    if (options_.checksum) entry->checksums.resize(block_count(nbytes, options_.block_nbytes, file_->alignment()));
    entry->offset = extents_.take(nbytes);
    try {
      file_->grow(extents_.end());
      auto& place = entries_[key];
      if (place) extents_.give_back(place->offset, place->nbytes);
      place = std::move(entry);
      return *place;
    } catch (...) {
      extents_.give_back(entry->offset, nbytes);
      throw;
    }
  }

  /// After fork the I/O thread exists in the parent only, and locks may be held for ever: touch nothing, free nothing.
  void abandon() noexcept {
    if (std::exchange(closed_, true)) return;
    [[maybe_unused]] auto* runner = runner_.release();
    [[maybe_unused]] auto* file = file_.release();
    directory_->disown();
  }

  const Options options_;
  const pid_t owner_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  std::unique_ptr<SwapDirectory> directory_;
  std::unique_ptr<DataFile> file_;
  std::unique_ptr<SwapRunner> runner_;
  Extents extents_;
  std::unordered_map<std::string, std::unique_ptr<SwapEntry>> entries_;
};

void check_options(const SwapFile::Options& options) {
  if (options.block_nbytes == 0 || options.block_nbytes % kExtentAlign != 0 || options.block_nbytes > kMaxBlock)
    throw InvalidArgument(text("SwapFile: block_nbytes ", options.block_nbytes, " is not a multiple of ", kExtentAlign,
                               " up to ", kMaxBlock));
  if (options.depth < 1 || options.depth > kMaxDepth)
    throw InvalidArgument(text("SwapFile: depth ", options.depth, " is not in 1..", kMaxDepth));
}

std::unique_ptr<IoEngine> make_engine(const SwapFile::Options& options) {
  auto choice = options.engine;
  if (choice == SwapFile::Engine::automatic) {
    if (const auto asked = read_env().io)
      choice = *asked == "threads" ? SwapFile::Engine::threads : SwapFile::Engine::io_uring;
  }
  if (choice == SwapFile::Engine::threads) return make_thread_engine(options.depth);
  if (auto engine = make_io_uring_engine(options.depth)) return engine;
  if (choice == SwapFile::Engine::automatic) return make_thread_engine(options.depth);
  throw Unsupported(
      "SwapFile: io_uring is not built in or refused by the kernel (containers often do); use engine "
      "'threads' or 'auto'");
}

}  // namespace

std::unique_ptr<SwapFile> open_swap_file(const std::string& directory, const SwapFile::Options& options,
                                         std::unique_ptr<IoEngine> engine) {
  check_options(options);
  return std::make_unique<SwapFileImpl>(directory, options, std::move(engine));
}

}  // namespace mem

std::unique_ptr<SwapFile> SwapFile::open(const std::string& directory, Options options) {
  mem::check_options(options);
  return mem::open_swap_file(directory, options, mem::make_engine(options));
}

}  // namespace zcomm
