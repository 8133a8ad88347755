// Segments and the process-wide registry that maps each memfd at most once.
//
// Invariants: a segment's size is sealed before another process sees it, and only sealed files are mapped: no peer can
// shrink it under us (SIGBUS). A registry entry never keeps a mapping alive.
// Thread rule: the registry is locked; mappings are immutable. Source: memfd_create(2), fcntl(2) "File Sealing".
#include "heap/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace zcomm::heap {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr int kCollapse = 25;  // MADV_COLLAPSE; older headers lack it
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

using FileId = std::pair<dev_t, ino_t>;

struct Registry {
  std::mutex mutex;
  std::map<FileId, std::weak_ptr<Mapping>> mappings;
};

Registry& registry() {
  static Registry* const instance = new Registry;  // never destroyed: mappings may outlive static objects
  return *instance;
}

std::size_t round_to_pages(std::size_t nbytes) {
  const std::size_t page = page_nbytes();
  if (nbytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()) - page) {
    throw_system_error(ENOMEM, text("cannot make a segment of ", nbytes, " bytes"));
  }
  return nbytes == 0 ? page : (nbytes + page - 1) / page * page;
}

UniqueFd make_memfd(std::size_t nbytes) {
  constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
#ifdef MFD_NOEXEC_SEAL
  UniqueFd fd(::memfd_create("zcomm", flags | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd.reset(::memfd_create("zcomm", flags));  // kernel before 6.3
#else
  UniqueFd fd(::memfd_create("zcomm", flags));
#endif
  if (!fd) throw_system_error(errno, text("cannot make a segment of ", nbytes, " bytes (memfd_create)"));
  return fd;
}

/// An address at which huge pages of `nbytes` of a file are also huge in this mapping: a multiple of their size.
/// Reserved; to be mapped over. Small files may be anywhere.
void* place_for(std::size_t nbytes) {
  if (nbytes < kHugePage) return nullptr;
  void* const reserved = ::mmap(nullptr, nbytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(reserved);
  const std::size_t head = (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
  if (head > 0) ::munmap(begin, head);
  ::munmap(begin + head + nbytes, kHugePage - head);
  return begin + head;
}

}  // namespace

class Mapping {
 public:
  Mapping(UniqueFd fd, FileId id, std::size_t nbytes) : fd_(std::move(fd)), id_(id), nbytes_(nbytes) {
    void* const place = place_for(nbytes_);
    const int flags = MAP_SHARED | (place != nullptr ? MAP_FIXED : 0);
    void* const data = ::mmap(place, nbytes_, PROT_READ | PROT_WRITE, flags, fd_.get(), 0);
    if (data == MAP_FAILED) {
      const int error = errno;
      if (place != nullptr) ::munmap(place, nbytes_);
      throw_system_error(error, text("cannot map a segment of ", nbytes_, " bytes"));
    }
    data_ = static_cast<std::byte*>(data);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    {
      const std::lock_guard lock(registry().mutex);
      const auto entry = registry().mappings.find(id_);
      // Another thread may have mapped the file again since the last owner dropped this mapping.
      if (entry != registry().mappings.end() && entry->second.expired()) registry().mappings.erase(entry);
    }
    ::munmap(data_, nbytes_);
  }

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  int fd() const { return fd_.get(); }

  /// [Note: huge pages of shared memory] Large pages for whole blocks of a new file: a hint, refused without harm. Most
  /// systems grant shared memory none by default; MADV_COLLAPSE (Linux 6.1) requests them at once, whatever the
  /// setting, if a block has at least one page. Peers' mappings then use them as well.
  void ask_for_huge_pages() {
    const std::size_t whole = nbytes_ / kHugePage * kHugePage;
    if (whole == 0) return;
    ::madvise(data_, whole, MADV_HUGEPAGE);
    for (std::size_t at = 0; at < whole; at += kHugePage) {
      *reinterpret_cast<volatile char*>(data_ + at) = 0;
      if (::madvise(data_ + at, kHugePage, kCollapse) != 0) return;  // no contiguous memory, or no such call
    }
  }

 private:
  UniqueFd fd_;
  FileId id_;
  std::size_t nbytes_;
  std::byte* data_ = nullptr;
};

std::size_t page_nbytes() {
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return page;
}

Segment Segment::create(std::size_t nbytes) {
  const std::size_t file_nbytes = round_to_pages(nbytes);
  UniqueFd fd = make_memfd(nbytes);
  if (::ftruncate(fd.get(), static_cast<off_t>(file_nbytes)) != 0) {
    const char* hint = errno == EFBIG ? "; the file size limit (ulimit -f) counts for shared memory, too" : "";
    throw_system_error(errno, text("cannot make a segment of ", nbytes, " bytes (ftruncate)", hint));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSizeSeals) != 0) {
    throw_system_error(errno, text("cannot seal the size of a segment of ", nbytes, " bytes"));
  }
  Segment segment = map(std::move(fd), nbytes);
  segment.mapping_->ask_for_huge_pages();
  return segment;
}

Segment Segment::map(UniqueFd fd, std::size_t nbytes) {
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) {
    throw_system_error(errno, text("cannot map a segment of ", nbytes, " bytes (fstat of descriptor ", fd.get(), ")"));
  }
  const auto file_nbytes = static_cast<std::size_t>(status.st_size);
  if (file_nbytes == 0 || file_nbytes < nbytes) {
    throw InvalidArgument(text("cannot map ", nbytes, " bytes of a segment that has ", file_nbytes));
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw InvalidArgument(text("descriptor ", fd.get(), " is not a segment; expected a memfd of sealed size"));
  }
  Segment segment;
  segment.nbytes_ = nbytes;
  const FileId id(status.st_dev, status.st_ino);
  const std::lock_guard lock(registry().mutex);
  std::weak_ptr<Mapping>& entry = registry().mappings[id];
  segment.mapping_ = entry.lock();
  if (!segment.mapping_) {
    // Not make_shared: the weak entry must not keep the object's memory. A failure leaves a harmless expired entry.
    segment.mapping_ = std::shared_ptr<Mapping>(new Mapping(std::move(fd), id, file_nbytes));
    entry = segment.mapping_;
  }
  return segment;
}

Segment Segment::holding(const std::byte* address, std::size_t nbytes) {
  std::vector<std::shared_ptr<Mapping>> seen;  // a last owner must be destroyed without the lock, which ~Mapping takes
  const std::lock_guard lock(registry().mutex);
  for (const auto& [id, entry] : registry().mappings) {
    const std::shared_ptr<Mapping>& mapping = seen.emplace_back(entry.lock());
    if (!mapping || address < mapping->data()) continue;
    const auto offset = static_cast<std::size_t>(address - mapping->data());
    if (offset > mapping->nbytes() || nbytes > mapping->nbytes() - offset) continue;
    Segment segment;
    segment.nbytes_ = mapping->nbytes();
    segment.mapping_ = mapping;
    return segment;
  }
  throw InvalidArgument(text("no segment of this process holds ", nbytes, " bytes at ", address));
}

std::byte* Segment::data() const { return mapping_ ? mapping_->data() : nullptr; }

int Segment::fd() const { return mapping_ ? mapping_->fd() : -1; }

}  // namespace zcomm::heap
