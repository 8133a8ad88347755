#include "mem/stripes.hpp"

namespace zcomm::mem {

Place Stripes::take(std::size_t nbytes) {
  Place place{next_, std::vector<std::uint64_t>(extents_.size())};
  for (std::size_t drive = 0; drive < extents_.size(); ++drive)
    place.offsets[drive] = extents_[drive].take(share(place, drive, nbytes));
  next_ = (next_ + round_up(nbytes, stripe_nbytes_) / stripe_nbytes_) % extents_.size();
  return place;
}

void Stripes::give_back(const Place& place, std::size_t nbytes) {
  for (std::size_t drive = 0; drive < extents_.size(); ++drive)
    extents_[drive].give_back(place.offsets[drive], share(place, drive, nbytes));
}

std::uint64_t Stripes::used_nbytes() const {
  std::uint64_t used = 0;
  for (const Extents& each : extents_) used += each.used_nbytes();
  return used;
}

Location Stripes::locate(const Place& place, std::uint64_t begin, std::size_t stripe_nbytes) {
  const std::size_t drives = place.offsets.size();
  const std::uint64_t stripe = begin / stripe_nbytes;
  const std::size_t drive = (place.first + stripe) % drives;
  return {drive, place.offsets[drive] + stripe / drives * stripe_nbytes + begin % stripe_nbytes};
}

std::uint64_t Stripes::share(const Place& place, std::size_t drive, std::size_t nbytes) const {
  const std::size_t drives = extents_.size();
  const std::size_t turn = (drive + drives - place.first) % drives;
  const std::size_t whole = nbytes / stripe_nbytes_, last = whole % drives;
  return (whole / drives + (turn < last ? 1 : 0)) * stripe_nbytes_ + (turn == last ? nbytes % stripe_nbytes_ : 0);
}

}  // namespace zcomm::mem
