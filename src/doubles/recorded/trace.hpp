// Trace: which actor touched which bytes in which order, and which of those accesses are unordered.
//
// A recorded device (record_device) records the operations of its streams; touch() adds other accesses (torch's
// kernels, the CPU optimizer, a collective). The trace knows these orders: a stream's own; an operation follows all
// earlier operations of the host thread that queued it; event record -> wait; event or stream -> the host thread that
// found it done (synchronize, done, wait_for); and each order(). A race is found from the order of the calls only: it
// need not happen in the run. Only the first 1000 are kept. Memory grows with the number of operations. Thread rule:
// free-threaded. Source: [Note: vector clocks] in race_finder.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "doubles/recorded/race_finder.hpp"

namespace zcomm::device {

/// The memory of one operation; memory both read and written is in both lists.
struct Footprint {
  std::vector<ByteRange> reads, writes;
  static ByteRange range(const void* data, std::size_t nbytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    return {begin, begin + nbytes};
  }
};

struct Race {
  struct Side {
    std::string actor, label;
    std::uint64_t operation = 0;  ///< its index in the trace
    ByteRange range;
    bool is_write = false;
  };
  Side first, second;  ///< in the order of the trace
  ByteRange overlap;
  std::string remedy;  ///< a way to order them
  std::string describe() const;
};

class Trace {
 public:
  /// A stream, a host thread, or a queue with a name.
  using Actor = int;
  /// The operations queued for an actor by some moment.
  using Point = std::shared_ptr<const RaceFinder::Clock>;

  Trace();

  Actor host();                               ///< the calling thread
  Actor queue(const std::string& name);       ///< runs its operations in order, concurrent with the host ("comm")
  Actor add_stream(const std::string& name);  ///< a new stream
  void rename(Actor actor, const std::string& name);
  /// Appended to the labels of all later operations of the calling thread: "copy, bucket 3"; "" ends it.
  void set_subject(const std::string& subject);

  /// An operation of `actor` that makes no other accesses.
  void touch(Actor actor, const Footprint& footprint, const std::string& label);
  /// The memory is freed by the calling thread; any later use of it races.
  void free(ByteRange range);
  Point mark(Actor actor);
  /// Orders later operations of `after` behind the point.
  void order(const Point& before, Actor after);
  void order(Actor before, Actor after) { order(mark(before), after); }

  std::vector<Race> races() const;
  /// How many operations have been recorded, and races found (also those that were not kept).
  std::size_t operations() const;
  std::size_t race_count() const;

 private:
  struct Participant {
    std::string name;
    bool is_host;
  };
  struct Access {
    std::uint32_t operation;
    ByteRange range;
    bool is_write;
  };
  struct Operation {
    Actor actor;
    std::string label;
  };
  Actor add(std::string name, bool is_host);
  void begin(Actor actor, const std::string& label);
  void add_access(Actor actor, ByteRange range, bool is_write);
  void found(std::uint32_t earlier, std::uint32_t later, ByteRange overlap);
  Race::Side side(std::uint32_t access) const;
  std::string remedy(Actor first, const Race& race, Actor second) const;

  mutable std::mutex mutex_;
  RaceFinder finder_;
  std::vector<Participant> participants_;
  struct Host {
    Actor actor = -1;
    std::string subject;
  };
  Host& this_host();
  std::map<std::uint64_t, Host> hosts_;  // by a thread number that is never reused
  std::map<std::string, Actor> queues_;
  std::vector<Operation> operations_;
  std::vector<Access> accesses_;
  struct Found {
    std::uint32_t earlier, later;
    ByteRange overlap;
  };
  std::vector<Found> found_;
  std::size_t race_count_ = 0, found_before_ = 0;
};

/// Wraps `device` and records the operations of its streams in `trace`. Its streams accept only its own events.
std::shared_ptr<Device> record_device(std::shared_ptr<Device> device, std::shared_ptr<Trace> trace);
/// For a stream or event of a recorded device; InvalidArgument for others.
Trace::Actor actor_of(Stream& stream);
Trace::Point point_of(Event& event);

}  // namespace zcomm::device
