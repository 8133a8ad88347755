#include "device/in_parts.hpp"

#include <algorithm>

#include "base/float_mode.hpp"

namespace zcomm::device {
namespace {

constexpr std::size_t kPartNbytes = 8 << 20;  // read and written: below it the wake-ups cost more
constexpr std::size_t kPartAlign = 4096;      // elements: whole pages each
constexpr int kMostThreads = 8;               // fill the memory of one socket

}  // namespace

std::size_t least_part_count(std::size_t element_nbytes) {
  return kPartNbytes / std::max<std::size_t>(1, element_nbytes);
}

void in_parts(std::size_t count, std::size_t element_nbytes, const ThreadPool::Body& body) {
  const std::size_t least = least_part_count(element_nbytes);
  if (count < least) {
    const DefaultFloatMode mode;
    return body(0, count);
  }
  // In pieces, because an update that holds the pool would otherwise leave a whole bucket to one thread, and wait for
  // it.
  const std::size_t piece = std::max(kPartAlign, least / kPartAlign * kPartAlign);
  ThreadPool::shared().parallel_for_if_idle(count, kPartAlign, kMostThreads, piece, body);
}

}  // namespace zcomm::device
