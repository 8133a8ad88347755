// AddressRange::alias and take: a second mapping of shared pages without their descriptor, and moving it.
// Source: mremap(2).
#include <sys/mman.h>

#include <cerrno>

#include "base/error.hpp"
#include "heap/segment.hpp"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4  // of <linux/mman.h>, which older libraries do not have
#endif

namespace zcomm::heap {

namespace {
constexpr int kMove = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
}

void AddressRange::alias(std::size_t offset, const std::byte* shared, std::size_t nbytes) {
  if (offset > nbytes_ || nbytes > nbytes_ - offset)
    throw InvalidArgument(
        text("AddressRange.alias: [", offset, ", ", offset + nbytes, ") is outside of ", nbytes_, " bytes"));
  if (nbytes == 0) return;
  // An old size of 0 asks for a copy of the mapping; it shares the pages because the original is MAP_SHARED.
  void* source = const_cast<std::byte*>(shared);
  void* at = mremap(source, 0, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, data_ + offset);
  if (at == MAP_FAILED) throw_system_error(errno, text("AddressRange.alias: mapping ", nbytes, " bytes"));
#ifdef MADV_POPULATE_WRITE
  madvise(at, nbytes, MADV_POPULATE_WRITE);  // one call instead of a fault per page; only a hint
#endif
}

void AddressRange::take(std::size_t offset, AddressRange& from, std::size_t from_offset, std::size_t nbytes) {
  for (const std::size_t value : {offset, from_offset, nbytes})
    if (value % page_nbytes() != 0)
      throw InvalidArgument(text("AddressRange.take: ", value, " is not a multiple of the page size ", page_nbytes()));
  if (offset > nbytes_ || nbytes > nbytes_ - offset)
    throw InvalidArgument(
        text("AddressRange.take: [", offset, ", ", offset + nbytes, ") is outside of ", nbytes_, " bytes"));
  if (from_offset > from.nbytes_ || nbytes > from.nbytes_ - from_offset)
    throw InvalidArgument(text("AddressRange.take: [", from_offset, ", ", from_offset + nbytes, ") is outside of ",
                               from.nbytes_, " bytes to take from"));
  if (nbytes == 0) return;
  if (!moves_mappings()) throw Unsupported("AddressRange.take: needs Linux 5.13");
  // Left mapped at first, so that no other allocation can slip into the gap.
  if (mremap(from.data_ + from_offset, nbytes, nbytes, kMove, data_ + offset) == MAP_FAILED)
    throw_system_error(errno, text("AddressRange.take: moving ", nbytes, " bytes"));
  from.unmap(from_offset, nbytes);
}

bool moves_mappings() {
  static const bool does = [] {
    const std::size_t page = page_nbytes();
    const auto map = [page](int flags) { return ::mmap(nullptr, page, PROT_READ, flags | MAP_ANONYMOUS, -1, 0); };
    void *const source = map(MAP_SHARED), *const target = map(MAP_PRIVATE);
    if (source == MAP_FAILED || target == MAP_FAILED) return false;
    // An old system that refuses has unmapped the target before: it may be another thread's by now.
    const bool moved = mremap(source, page, page, kMove, target) != MAP_FAILED;
    ::munmap(source, page);
    if (moved) ::munmap(target, page);
    return moved;
  }();
  return does;
}

}  // namespace zcomm::heap
