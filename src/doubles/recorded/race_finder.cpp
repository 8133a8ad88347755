// See race_finder.hpp.
#include "doubles/recorded/race_finder.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace zcomm::device {

int RaceFinder::add_actor() {
  const std::size_t number = clocks_.size();
  for (Clock& clock : clocks_) clock.resize(number + 1);
  clocks_.emplace_back(number + 1);
  return static_cast<int>(number);
}

void RaceFinder::join(int after, const Clock& clock) {
  Clock& own = clocks_[static_cast<std::size_t>(after)];
  for (std::size_t i = 0; i < clock.size(); ++i) own[i] = std::max(own[i], clock[i]);
}

RaceFinder::Access RaceFinder::access_of(int actor, std::uint32_t number) const {
  return {actor, number, clock(actor)[static_cast<std::size_t>(actor)]};
}

void RaceFinder::check(const Access& earlier, const Access& later, ByteRange overlap) {
  if (earlier.actor < 0 || clock(later.actor)[static_cast<std::size_t>(earlier.actor)] >= earlier.time) return;
  report_(earlier.number, later.number, overlap);
}

/// Makes `at` a boundary, if it lies within an interval.
void RaceFinder::split(std::uintptr_t at) {
  auto after = map_.upper_bound(at);
  if (after == map_.begin()) return;
  const auto inside = std::prev(after);
  if (inside->first == at || inside->second.end <= at) return;
  Bytes rest = inside->second;
  inside->second.end = at;
  map_.emplace_hint(after, at, std::move(rest));
}

void RaceFinder::read(int actor, ByteRange range, std::uint32_t number) {
  if (range.begin >= range.end) return;
  split(range.begin);
  split(range.end);
  const Access access = access_of(actor, number);
  auto next = map_.lower_bound(range.begin);
  for (std::uintptr_t at = range.begin; at < range.end;) {
    if (next == map_.end() || next->first > at) {  // no actor has touched the bytes before `next`
      const std::uintptr_t end = next == map_.end() ? range.end : std::min(range.end, next->first);
      map_.emplace_hint(next, at, Bytes{end, {}, {access}});
      at = end;
      continue;
    }
    Bytes& bytes = next->second;
    check(bytes.write, access, {at, bytes.end});
    const auto own = std::find_if(bytes.reads.begin(), bytes.reads.end(),
                                  [&](const Access& earlier) { return earlier.actor == actor; });
    if (own == bytes.reads.end())
      bytes.reads.push_back(access);
    else
      *own = access;
    at = bytes.end;
    ++next;
  }
}

void RaceFinder::write(int actor, ByteRange range, std::uint32_t number) {
  if (range.begin >= range.end) return;
  split(range.begin);
  split(range.end);
  const Access access = access_of(actor, number);
  const auto first = map_.lower_bound(range.begin);
  auto last = first;
  for (; last != map_.end() && last->first < range.end; ++last) {
    const ByteRange overlap{last->first, last->second.end};
    check(last->second.write, access, overlap);
    for (const Access& read : last->second.reads) check(read, access, overlap);
  }
  map_.emplace_hint(map_.erase(first, last), range.begin, Bytes{range.end, access, {}});
}

void RaceFinder::forget(ByteRange range) {
  if (range.begin >= range.end) return;
  split(range.begin);
  split(range.end);
  map_.erase(map_.lower_bound(range.begin), map_.lower_bound(range.end));
}

}  // namespace zcomm::device
