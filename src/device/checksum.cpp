#include "device/checksum.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"

namespace zcomm::device {

void check_checksum(const Checksum& args) {
  if (args.sum == nullptr || (args.data == nullptr && args.nbytes > 0))
    throw InvalidArgument(text("checksum: ", args.sum == nullptr ? "sum" : "data", " is null, nbytes ", args.nbytes));
}

void checksum(const Checksum& args) {
  check_checksum(args);
  const auto* bytes = static_cast<const std::byte*>(args.data);
  std::uint64_t sum = 0;
  for (std::size_t begin = 0; begin < args.nbytes; begin += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + begin, std::min(sizeof(word), args.nbytes - begin));
    sum += checksum_term(word, begin / sizeof(word));
  }
  *args.sum += sum;
}

}  // namespace zcomm::device
