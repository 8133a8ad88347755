// RaceFinder: finds two unordered accesses to the same bytes, one of them a write.
//
// [Note: vector clocks] Each actor (a stream, a host thread, a queue) counts its operations; its clock holds, for each
// actor, the number of that actor's operations known to precede its own next one. join() merges another clock. An
// earlier access is ordered before a new one if the new one's actor knows its count. Each byte remembers its last write
// and each actor's last read since: earlier accesses are ordered before those, or have been reported. The bytes lie in
// a map of intervals, so that the cost is near-linear in the number of accesses. Invariants: each report is true; for
// each byte, the first access that races (in the order of the calls) is reported. Thread rule: one thread. Source:
// FastTrack (Flanagan, Freund 2009), on intervals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace zcomm::device {

struct ByteRange {
  std::uintptr_t begin = 0, end = 0;
};

class RaceFinder {
 public:
  using Clock = std::vector<std::uint64_t>;
  /// Called with the earlier access's number, the new one's, and the bytes that both touch.
  using Report = std::function<void(std::uint32_t earlier, std::uint32_t later, ByteRange overlap)>;
  explicit RaceFinder(Report report) : report_(std::move(report)) {}

  int add_actor();
  const Clock& clock(int actor) const { return clocks_[static_cast<std::size_t>(actor)]; }
  /// Orders the next operations of `after` behind all operations in `clock`.
  void join(int after, const Clock& clock);
  /// Starts the actor's next operation; its accesses follow.
  void tick(int actor) { ++clocks_[static_cast<std::size_t>(actor)][static_cast<std::size_t>(actor)]; }
  void read(int actor, ByteRange range, std::uint32_t number);
  void write(int actor, ByteRange range, std::uint32_t number);
  /// The bytes have been freed: later accesses are to other memory.
  void forget(ByteRange range);

 private:
  struct Access {
    int actor = -1;
    std::uint32_t number = 0;
    std::uint64_t time = 0;
  };
  struct Bytes {
    std::uintptr_t end = 0;
    Access write;               ///< actor -1: none
    std::vector<Access> reads;  ///< since the write, one per actor
  };
  using Map = std::map<std::uintptr_t, Bytes>;

  Access access_of(int actor, std::uint32_t number) const;
  void check(const Access& earlier, const Access& later, ByteRange overlap);
  void split(std::uintptr_t at);

  Report report_;
  std::vector<Clock> clocks_;
  Map map_;
};

}  // namespace zcomm::device
