// PrivateView: copied pages are found by PAGEMAP_SCAN (Linux 6.7), else /proc/self/pagemap; else every page counts.
#include "heap/private_view.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>

#include "base/error.hpp"

namespace zcomm::heap {
namespace {

// Of <linux/fs.h>; older systems lack it.
struct ScanArguments {
  std::uint64_t size, flags, start, end, walk_end, regions, region_count, max_pages;
  std::uint64_t inverted, all_of, any_of, wanted;
};
struct ScanRegion {
  std::uint64_t start, end, categories;
};
constexpr unsigned long kPagemapScan = _IOWR('f', 16, ScanArguments);
constexpr std::uint64_t kOfFile = 1U << 2, kPresent = 1U << 3, kSwapped = 1U << 4;

// Bits of an entry of /proc/self/pagemap.
constexpr std::uint64_t kEntryPresent = std::uint64_t{1} << 63, kEntrySwapped = std::uint64_t{1} << 62,
                        kEntryOfFile = std::uint64_t{1} << 61;

using Ranges = std::vector<ByteRange>;

void append(Ranges& ranges, std::size_t begin, std::size_t end) {
  if (!ranges.empty() && ranges.back().second == begin) {
    ranges.back().second = end;
  } else {
    ranges.emplace_back(begin, end);
  }
}

/// Empty if the kernel has no such call.
std::optional<Ranges> scan(int pagemap, const std::byte* data, std::size_t nbytes) {
  const auto base = reinterpret_cast<std::uintptr_t>(data);
  std::array<ScanRegion, 256> regions;
  Ranges ranges;
  ScanArguments arguments{};
  arguments.size = sizeof(arguments);
  arguments.start = base;
  arguments.end = base + nbytes;
  arguments.regions = reinterpret_cast<std::uintptr_t>(regions.data());
  arguments.region_count = regions.size();
  arguments.inverted = arguments.all_of = kOfFile;  // a copy is not a page of the file
  arguments.any_of = arguments.wanted = kPresent | kSwapped;
  while (arguments.start < arguments.end) {
    const int found = ::ioctl(pagemap, kPagemapScan, &arguments);
    if (found < 0 && errno == EINTR) continue;
    if (found < 0 || arguments.walk_end <= arguments.start) return std::nullopt;
    for (const ScanRegion& region : std::span(regions).first(static_cast<std::size_t>(found)))
      append(ranges, region.start - base, region.end - base);
    arguments.start = arguments.walk_end;
  }
  return ranges;
}

/// Empty if the entries cannot be read.
std::optional<Ranges> read_entries(int pagemap, const std::byte* data, std::size_t nbytes) {
  const std::size_t page = page_nbytes(), count = nbytes / page;
  const std::size_t first = reinterpret_cast<std::uintptr_t>(data) / page;
  std::array<std::uint64_t, 4096> entries;
  Ranges ranges;
  for (std::size_t at = 0; at < count;) {
    const std::size_t wanted = std::min(entries.size(), count - at) * sizeof(entries[0]);
    const auto offset = static_cast<off_t>((first + at) * sizeof(entries[0]));
    const ssize_t got = ::pread(pagemap, entries.data(), wanted, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < static_cast<ssize_t>(sizeof(entries[0]))) return std::nullopt;
    const auto pages = static_cast<std::size_t>(got) / sizeof(entries[0]);
    for (std::size_t i = 0; i < pages; ++i) {
      const bool there = (entries[i] & (kEntryPresent | kEntrySwapped)) != 0;
      if (there && (entries[i] & kEntryOfFile) == 0) append(ranges, (at + i) * page, (at + i + 1) * page);
    }
    at += pages;
  }
  return ranges;
}

}  // namespace

PrivateView::PrivateView(const std::byte* shared, std::size_t nbytes)
    : segment_(Segment::holding(shared, nbytes)), shared_(const_cast<std::byte*>(shared)), nbytes_(nbytes) {
  const std::size_t page = page_nbytes(), mapped = (nbytes + page - 1) / page * page;
  const auto offset = static_cast<std::size_t>(shared - segment_.data());
  if (offset % page != 0) throw InvalidArgument(text("a private view begins at byte ", offset, ", not at a page"));
  range_ = AddressRange::reserve(mapped);
  if (mapped == 0) return;
  // Not populated, because the kernel would write to each page of a private mapping, and so copy it.
  void* const data = ::mmap(range_.data(), mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                            segment_.fd(), static_cast<off_t>(offset));
  if (data == MAP_FAILED) throw_system_error(errno, text("cannot view ", nbytes, " bytes of a segment privately"));
}

Ranges PrivateView::copied() const {
  const std::size_t mapped = range_.nbytes();
  if (mapped == 0) return {};
  // Opened each time, because a descriptor from before a fork would show the parent's pages.
  const UniqueFd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (pagemap) {
    if (auto ranges = scan(pagemap.get(), data(), mapped)) return *std::move(ranges);
    if (auto ranges = read_entries(pagemap.get(), data(), mapped)) return *std::move(ranges);
  }
  return {{0, mapped}};
}

std::size_t PrivateView::merge(std::span<const ByteRange> own) {
  std::size_t nbytes = 0;
  auto mine = own.begin();
  for (const auto& [begin, end] : copied()) {
    while (mine != own.end() && mine->second <= begin) ++mine;
    for (auto part = mine; part != own.end() && part->first < end; ++part) {
      const std::size_t low = std::max(begin, part->first), high = std::min({end, part->second, nbytes_});
      if (low < high) std::memcpy(shared_ + low, data() + low, high - low);
    }
    if (::madvise(data() + begin, end - begin, MADV_DONTNEED) != 0)
      throw_system_error(errno, text("cannot drop ", end - begin, " copied bytes of a private view"));
    nbytes += end - begin;
  }
  return nbytes;
}

}  // namespace zcomm::heap
