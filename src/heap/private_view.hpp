// PrivateView: a copy-on-write view of a segment (decision D4).
//
// Ranks of a host keep one copy of the parameters. A program that edits its parameters must not edit the other ranks'.
// So it sees the segment through a private mapping: reads show the shared pages, and a write copies the page for this
// rank only. merge() writes this rank's part of such copies to the segment and drops the copies.
//
// Invariant: a page of the view is either the segment's page or a copy that this process wrote after the last merge().
// Thread rule: as the caller orders it; nothing may write to the view during merge().
// Source: mmap(2) MAP_PRIVATE, madvise(2) MADV_DONTNEED, ioctl_pagemap_scan(2), proc_pid_pagemap(5).
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "heap/segment.hpp"

namespace zcomm::heap {

/// Bytes [begin, end) of a view.
using ByteRange = std::pair<std::size_t, std::size_t>;

class PrivateView {
 public:
  /// Views `nbytes` of a live segment of this process at `shared`, which begins at a page. Throws InvalidArgument if no
  /// segment contains it, SystemError naming nbytes.
  PrivateView(const std::byte* shared, std::size_t nbytes);

  std::byte* data() const { return range_.data(); }
  std::size_t nbytes() const { return nbytes_; }

  /// The ranges of pages that this process has written to, ascending. If the system does not report them: the whole
  /// view.
  std::vector<ByteRange> copied() const;

  /// Writes the copied parts of `own` (ascending, disjoint) to the segment, then maps the segment's pages again.
  /// Returns the bytes of copied pages.
  std::size_t merge(std::span<const ByteRange> own);

 private:
  Segment segment_;
  std::byte* shared_ = nullptr;
  AddressRange range_;
  std::size_t nbytes_ = 0;
};

}  // namespace zcomm::heap
