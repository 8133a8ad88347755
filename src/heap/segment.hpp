// Segment: one memfd that several ranks map (decision D1).
//
// No name in /dev/shm: nothing leaks after SIGKILL, no other user can open it. A segment is mapped at most once per
// process, so ranks that are threads see the same addresses (and the thread sanitizer sees their races). Thread rule:
// create and map are free-threaded; a Segment object is used by one thread at a time.
#pragma once

#include <cstddef>
#include <memory>

#include "base/unique_fd.hpp"

namespace zcomm::heap {

class Mapping;  // the process's one mapping of a memfd; shared by Segments

class Segment {
 public:
  Segment() = default;
  /// Zero-filled memory of `nbytes` (rounded up to pages internally). Throws SystemError naming nbytes.
  static Segment create(std::size_t nbytes);
  /// Maps another process's segment; throws SystemError, or InvalidArgument if the file is shorter than nbytes.
  static Segment map(UniqueFd fd, std::size_t nbytes);
  /// The live segment of this process that holds all of [address, +nbytes); throws InvalidArgument if there is none.
  static Segment holding(const std::byte* address, std::size_t nbytes);

  std::byte* data() const;
  std::size_t nbytes() const { return nbytes_; }
  int fd() const;
  explicit operator bool() const { return mapping_ != nullptr; }

 private:
  std::shared_ptr<Mapping> mapping_;
  std::size_t nbytes_ = 0;
};

/// [Note: address range] A span of fixed addresses with changing memory behind it.
///
/// Stage 3 with swapped parameters assigns fixed addresses to every unit and maps a slot of a small ring behind them
/// while the unit is gathered: views that autograd saved in forward stay valid in backward, and no memory is allocated.
/// Unmapped addresses are PROT_NONE; in a range with Unmapped::kNan, addresses that were mapped before read as NaN and
/// cannot be written. All offsets and sizes are multiples of the page size. Mapping has a cost per page, while moving a
/// mapping (take) is nearly free: the system moves whole page tables if both positions begin at a multiple of
/// table_nbytes(). Ranges do.
class AddressRange {
 public:
  /// The result of reads at addresses that were mapped before. kNan: each number of each float format is NaN.
  enum class Unmapped { kFault, kNan };

  AddressRange() = default;
  static AddressRange reserve(std::size_t nbytes, Unmapped unmapped = Unmapped::kFault);
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;
  ~AddressRange();

  /// Maps `segment` bytes [segment_offset, +nbytes) at [offset, +nbytes).
  void map(std::size_t offset, const Segment& segment, std::size_t segment_offset, std::size_t nbytes);
  /// As map(), for memory known only by address: `shared` lies in a live mapping of a Segment.
  void alias(std::size_t offset, const std::byte* shared, std::size_t nbytes);
  /// Moves a mapping of one map() or alias() at [from_offset, +nbytes) of `from` here and leaves none there. Throws
  /// Unsupported unless moves_mappings().
  void take(std::size_t offset, AddressRange& from, std::size_t from_offset, std::size_t nbytes);
  /// Removes the mapping there.
  void unmap(std::size_t offset, std::size_t nbytes);

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
  std::byte* nan_ = nullptr;  // of Unmapped::kNan: pages mapped at addresses that were mapped before
  std::size_t nan_nbytes_ = 0;
};

std::size_t page_nbytes();
/// Whether the system moves mappings of shared memory and leaves no gap (Linux 5.13).
bool moves_mappings();
/// The bytes that one page table maps, with pages of 4 KiB.
constexpr std::size_t table_nbytes() { return std::size_t{2} << 20; }

}  // namespace zcomm::heap
