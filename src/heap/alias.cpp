// AddressRange::alias: a second mapping of shared pages without their descriptor.
#include <sys/mman.h>

#include <cerrno>

#include "base/error.hpp"
#include "heap/segment.hpp"

namespace zcomm::heap {

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

}  // namespace zcomm::heap
