// AddressRange: reserved addresses with segments mapped behind parts of them ([Note: address range]).
//
// Invariant: every page of the range is always mapped, PROT_NONE or read-only if no segment is mapped there, so that no
// other allocation can enter a gap. Thread rule: as the caller orders it; disjoint parts may be changed at once.
// Source: mmap(2), mremap(2).
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "heap/segment.hpp"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4  // of <linux/mman.h>; older libraries lack it
#endif

namespace zcomm::heap {

namespace {

constexpr int kEmptyFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr std::size_t kNanMappings = 4096, kMostNanMappings = 8192;
constexpr std::size_t kLeastNanNbytes = 1 << 20, kMostNanNbytes = 32 << 20;
constexpr int kMove = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;

void check_pages(const char* name, std::size_t value) {
  if (value % page_nbytes() != 0) {
    throw InvalidArgument(text(name, " ", value, " is not a multiple of the page size ", page_nbytes()));
  }
}

/// Reserves addresses that begin at a multiple of table_nbytes().
std::byte* reserve_aligned(std::size_t nbytes) {
  const std::size_t table = table_nbytes();
  if (nbytes > SIZE_MAX - table) throw_system_error(ENOMEM, text("cannot reserve ", nbytes, " bytes of addresses"));
  void* const data = ::mmap(nullptr, nbytes + table, PROT_NONE, kEmptyFlags, -1, 0);
  if (data == MAP_FAILED) throw_system_error(errno, text("cannot reserve ", nbytes, " bytes of addresses"));
  auto* const begin = static_cast<std::byte*>(data);
  const std::size_t before = (table - reinterpret_cast<std::uintptr_t>(begin) % table) % table;
  if (before != 0) ::munmap(begin, before);
  ::munmap(begin + before + nbytes, table - before);
  return begin + before;
}

void check_inside(const char* what, std::size_t offset, std::size_t nbytes, std::size_t limit) {
  if (offset > limit || nbytes > limit - offset) {
    throw InvalidArgument(text("bytes [", offset, ", +", nbytes, ") are outside of ", what, " of ", limit, " bytes"));
  }
}

/// Read-only pages with all bits set, or null if the system refuses them. Shared, so that mremap(2) maps them again.
std::byte* make_nan_pages(std::size_t nbytes) {
  void* const data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  std::memset(data, 0xFF, nbytes);
  ::mprotect(data, nbytes, PROT_READ);
  return static_cast<std::byte*>(data);
}

/// Size of those pages, which count as memory of the process: the smallest that needs at most kNanMappings. A mapping
/// costs about 1 us, so 22 MiB take 18 us if the pages are 1 MiB.
std::size_t nan_nbytes(std::size_t nbytes) {
  const std::size_t page = page_nbytes();
  return std::clamp(nbytes / kNanMappings, kLeastNanNbytes, kMostNanNbytes) / page * page;
}

/// Maps `pages` over [begin, end), one mapping after the other; returns false if the system refuses.
bool map_again(std::byte* pages, std::size_t pages_nbytes, std::byte* begin, const std::byte* end) {
  for (std::byte* at = begin; at < end; at += pages_nbytes) {
    const std::size_t nbytes = std::min(pages_nbytes, static_cast<std::size_t>(end - at));
    if (::mremap(pages, 0, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) return false;
  }
  return true;
}

}  // namespace

AddressRange AddressRange::reserve(std::size_t nbytes, Unmapped unmapped) {
  check_pages("nbytes", nbytes);
  AddressRange range;
  if (nbytes == 0) return range;
  range.data_ = reserve_aligned(nbytes);
  range.nbytes_ = nbytes;
  // Leaves to others most of the mappings that a process may have (65,530 by default).
  const bool too_many = nbytes / kMostNanMappings >= kMostNanNbytes;
  if (unmapped == Unmapped::kNan && !too_many) {
    range.nan_nbytes_ = nan_nbytes(nbytes);
    range.nan_ = make_nan_pages(range.nan_nbytes_);
  }
  return range;
}

AddressRange::AddressRange(AddressRange&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      nan_(std::exchange(other.nan_, nullptr)),
      nan_nbytes_(std::exchange(other.nan_nbytes_, 0)) {}

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(nan_, other.nan_);
  std::swap(nan_nbytes_, other.nan_nbytes_);
  return *this;
}

AddressRange::~AddressRange() {
  if (data_ != nullptr) ::munmap(data_, nbytes_);
  if (nan_ != nullptr) ::munmap(nan_, nan_nbytes_);
}

void AddressRange::map(std::size_t offset, const Segment& segment, std::size_t segment_offset, std::size_t nbytes) {
  check_pages("offset", offset);
  check_pages("segment_offset", segment_offset);
  check_pages("nbytes", nbytes);
  check_inside("an address range", offset, nbytes, nbytes_);
  const std::size_t page = page_nbytes();
  check_inside("a segment", segment_offset, nbytes, (segment.nbytes() + page - 1) / page * page);
  if (nbytes == 0) return;
  // Populated: all page faults are taken here, not one by one in the middle of a kernel.
  void* const data = ::mmap(data_ + offset, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
                            segment.fd(), static_cast<off_t>(segment_offset));
  if (data == MAP_FAILED)
    throw_system_error(errno, text("cannot map ", nbytes, " bytes of a segment at a fixed place"));
}

void AddressRange::unmap(std::size_t offset, std::size_t nbytes) {
  check_pages("offset", offset);
  check_pages("nbytes", nbytes);
  check_inside("an address range", offset, nbytes, nbytes_);
  if (nbytes == 0) return;
  if (nan_ != nullptr && map_again(nan_, nan_nbytes_, data_ + offset, data_ + offset + nbytes)) return;
  if (::mmap(data_ + offset, nbytes, PROT_NONE, kEmptyFlags | MAP_FIXED, -1, 0) == MAP_FAILED) {
    throw_system_error(errno, text("cannot unmap ", nbytes, " bytes of an address range"));
  }
}

void AddressRange::alias(std::size_t offset, const std::byte* shared, std::size_t nbytes) {
  check_pages("offset", offset);
  check_pages("nbytes", nbytes);
  check_inside("an address range", offset, nbytes, nbytes_);
  if (nbytes == 0) return;
  // An old size of 0 asks for a copy of the mapping; it shares the pages because the original is MAP_SHARED.
  void* const source = const_cast<std::byte*>(shared);
  void* const at = ::mremap(source, 0, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, data_ + offset);
  if (at == MAP_FAILED) throw_system_error(errno, text("cannot map ", nbytes, " bytes a second time"));
#ifdef MADV_POPULATE_WRITE
  ::madvise(at, nbytes, MADV_POPULATE_WRITE);  // one call instead of a fault per page; only a hint
#endif
}

void AddressRange::take(std::size_t offset, AddressRange& from, std::size_t from_offset, std::size_t nbytes) {
  check_pages("offset", offset);
  check_pages("from_offset", from_offset);
  check_pages("nbytes", nbytes);
  check_inside("an address range", offset, nbytes, nbytes_);
  check_inside("the range to take from", from_offset, nbytes, from.nbytes_);
  if (nbytes == 0) return;
  if (!moves_mappings()) throw Unsupported("AddressRange.take: needs Linux 5.13");
  // The source stays mapped at first, so that no other allocation can enter the gap.
  if (::mremap(from.data_ + from_offset, nbytes, nbytes, kMove, data_ + offset) == MAP_FAILED)
    throw_system_error(errno, text("cannot move a mapping of ", nbytes, " bytes"));
  from.unmap(from_offset, nbytes);
}

bool moves_mappings() {
  static const bool does = [] {
    const std::size_t page = page_nbytes();
    const auto map = [page](int flags) { return ::mmap(nullptr, page, PROT_READ, flags | MAP_ANONYMOUS, -1, 0); };
    void *const source = map(MAP_SHARED), *const target = map(MAP_PRIVATE);
    if (source == MAP_FAILED || target == MAP_FAILED) return false;
    // If an old system refuses, it has already unmapped the target, which may be another thread's by now.
    const bool moved = mremap(source, page, page, kMove, target) != MAP_FAILED;
    ::munmap(source, page);
    if (moved) ::munmap(target, page);
    return moved;
  }();
  return does;
}

}  // namespace zcomm::heap
