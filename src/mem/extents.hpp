// Extents: the owner key of each range of the data file. Pure arithmetic, no I/O.
//
// Extents begin at multiples of kExtentAlign and never overlap; first fit, adjacent free extents are joined. Thread
// rule: the owner's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace zcomm::mem {

inline constexpr std::size_t kExtentAlign = 4096;  ///< O_DIRECT's unit on every drive we know

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

class Extents {
 public:
  /// First offset at which `nbytes` (rounded up to kExtentAlign) fit; may lie beyond the present end of the file.
  std::uint64_t take(std::size_t nbytes);
  /// Frees the extent that take(nbytes) returned.
  void give_back(std::uint64_t offset, std::size_t nbytes);

  std::uint64_t end() const { return end_; }  ///< bytes of file needed
  std::uint64_t used_nbytes() const { return used_; }

 private:
  std::map<std::uint64_t, std::uint64_t> holes_;  // offset -> nbytes
  std::uint64_t end_ = 0;
  std::uint64_t used_ = 0;
};

/// Piece of an operation with one I/O request and one checksum.
struct Block {
  std::size_t begin, nbytes;
  bool operator==(const Block&) const = default;
};

/// An operation of `nbytes` is cut into blocks of `block_nbytes`, and the rest beyond the last multiple of `alignment`
/// is a block of its own, so that only that tail needs a bounce buffer.
std::size_t block_count(std::size_t nbytes, std::size_t block_nbytes, std::size_t alignment);
Block block_at(std::size_t index, std::size_t nbytes, std::size_t block_nbytes, std::size_t alignment);

}  // namespace zcomm::mem
