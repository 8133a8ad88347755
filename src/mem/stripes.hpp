// Stripes: where the stripes of a key lie on several drives. Pure arithmetic, no I/O.
//
// A key is cut into stripes of `stripe_nbytes`. Stripe t lies on drive (first + t) % drives, and the stripes of one
// drive lie together in one extent there. The next key begins on the drive after the last one's, so that keys of a
// single stripe spread too. With one drive a key is one extent. Thread rule: the owner's lock; locate() is pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mem/extents.hpp"

namespace zcomm::mem {

/// The extents of one key.
struct KeyExtents {
  std::size_t first = 0;               ///< drive of its first stripe
  std::vector<std::uint64_t> offsets;  ///< per drive; of no meaning where the key has no stripe
};

struct Location {
  std::size_t drive;
  std::uint64_t offset;  ///< in that drive's data file
};

class Stripes {
 public:
  Stripes(std::size_t drives, std::size_t stripe_nbytes) : stripe_nbytes_(stripe_nbytes), extents_(drives) {}

  KeyExtents take(std::size_t nbytes);
  /// Gives back what take(nbytes) returned.
  void give_back(const KeyExtents& extents, std::size_t nbytes);

  std::uint64_t end(std::size_t drive) const { return extents_[drive].end(); }  ///< bytes of its file that are needed
  std::uint64_t used_nbytes() const;

  /// Bytes of a key of `nbytes` that lie on `drive`.
  std::uint64_t share(const KeyExtents& extents, std::size_t drive, std::size_t nbytes) const;
  /// Where byte `begin` of a key lies; what follows lies behind it up to the next multiple of `stripe_nbytes`.
  static Location locate(const KeyExtents& extents, std::uint64_t begin, std::size_t stripe_nbytes);

 private:
  const std::size_t stripe_nbytes_;
  std::size_t next_ = 0;
  std::vector<Extents> extents_;
};

}  // namespace zcomm::mem
