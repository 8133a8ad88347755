#include "mem/stripes.hpp"

namespace zcomm::mem {

KeyExtents Stripes::take(std::size_t nbytes) {
  KeyExtents extents{next_, std::vector<std::uint64_t>(extents_.size())};
  for (std::size_t drive = 0; drive < extents_.size(); ++drive)
    extents.offsets[drive] = extents_[drive].take(share(extents, drive, nbytes));
  next_ = (next_ + round_up(nbytes, stripe_nbytes_) / stripe_nbytes_) % extents_.size();
  return extents;
}

void Stripes::give_back(const KeyExtents& extents, std::size_t nbytes) {
  for (std::size_t drive = 0; drive < extents_.size(); ++drive)
    extents_[drive].give_back(extents.offsets[drive], share(extents, drive, nbytes));
}

std::uint64_t Stripes::used_nbytes() const {
  std::uint64_t used = 0;
  for (const Extents& each : extents_) used += each.used_nbytes();
  return used;
}

Location Stripes::locate(const KeyExtents& extents, std::uint64_t begin, std::size_t stripe_nbytes) {
  const std::size_t drives = extents.offsets.size();
  const std::uint64_t stripe = begin / stripe_nbytes;
  const std::size_t drive = (extents.first + stripe) % drives;
  return {drive, extents.offsets[drive] + stripe / drives * stripe_nbytes + begin % stripe_nbytes};
}

std::uint64_t Stripes::share(const KeyExtents& extents, std::size_t drive, std::size_t nbytes) const {
  const std::size_t drives = extents_.size();
  const std::size_t turn = (drive + drives - extents.first) % drives;
  const std::size_t whole = nbytes / stripe_nbytes_, last = whole % drives;
  return (whole / drives + (turn < last ? 1 : 0)) * stripe_nbytes_ + (turn == last ? nbytes % stripe_nbytes_ : 0);
}

}  // namespace zcomm::mem
