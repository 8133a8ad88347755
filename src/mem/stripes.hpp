// Stripes: the location of a key's stripes on several drives. Pure arithmetic, no I/O.
//
// A key is cut into stripes of `stripe_nbytes`. Stripe t lies on drive (first + t) % drives, and the stripes of one
// drive are contiguous in one extent. The next key begins on the drive after the last key's, so that keys of a single
// stripe spread as well. With one drive a key is one extent. Thread rule: the owner's lock; locate() is pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mem/extents.hpp"

namespace zcomm::mem {

/// The extents of one key.
struct KeyExtents {
  std::size_t first = 0;               ///< drive of its first stripe
  std::vector<std::uint64_t> offsets;  ///< per drive; meaningless if the key has no stripe there
};

struct Location {
  std::size_t drive;
  std::uint64_t offset;  ///< in that drive's data file
};

class Stripes {
 public:
  Stripes(std::size_t drives, std::size_t stripe_nbytes) : stripe_nbytes_(stripe_nbytes), extents_(drives) {}

  KeyExtents take(std::size_t nbytes);
  /// Frees the extents that take(nbytes) returned.
  void give_back(const KeyExtents& extents, std::size_t nbytes);

  std::uint64_t end(std::size_t drive) const { return extents_[drive].end(); }  ///< bytes of its file needed
  std::uint64_t used_nbytes() const;

  /// Bytes of a key of `nbytes` that lie on `drive`.
  std::uint64_t share(const KeyExtents& extents, std::size_t drive, std::size_t nbytes) const;
  /// The location of byte `begin` of a key; contiguous up to the next multiple of `stripe_nbytes`.
  static Location locate(const KeyExtents& extents, std::uint64_t begin, std::size_t stripe_nbytes);

 private:
  const std::size_t stripe_nbytes_;
  std::size_t next_ = 0;
  std::vector<Extents> extents_;
};

}  // namespace zcomm::mem
