// See overlap.hpp.
#include "coll/overlap.hpp"

#include <algorithm>
#include <cstdint>
#include <ios>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

struct ByteRange {
  std::uintptr_t begin, end;
  std::size_t index;
  bool empty() const { return begin == end; }
  bool is(const ByteRange& other) const { return begin == other.begin && end == other.end; }
  bool overlaps(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};

ByteRange range_of(const void* data, std::size_t nbytes, std::size_t index) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  return {begin, begin + nbytes, index};
}

std::string where(const char* side, const ByteRange& range) {
  std::ostringstream words;
  words << side << ' ' << range.index << " at [0x" << std::hex << range.begin << ", 0x" << range.end << ')';
  return words.str();
}

/// The part of the larger side that belongs to this rank: the smaller side may lie there; empty if there is none.
ByteRange own_part(const OverlapCheck& call, const ByteRange& in, const ByteRange& out) {
  const auto rank = static_cast<std::uintptr_t>(call.rank);
  switch (call.kind) {
    case OpKind::all_gather:
    case OpKind::gather: {
      const std::uintptr_t nbytes = in.end - in.begin;
      return {out.begin + rank * nbytes, out.begin + (rank + 1) * nbytes, in.index};
    }
    case OpKind::reduce_scatter:
    case OpKind::scatter: {
      const std::uintptr_t nbytes = (out.end - out.begin) / call.out_size * call.in_size;
      return {in.begin + rank * nbytes, in.begin + (rank + 1) * nbytes, out.index};
    }
    default:
      return {};
  }
}

/// True for an output of all_to_all that is this rank's part to itself in place: nothing writes to it then.
bool stays(const OverlapCheck& call, const ByteRange& in, const ByteRange& out) {
  const auto rank = static_cast<std::size_t>(call.rank);
  const ConstBuffer& own = call.in[rank];
  return out.index == rank && in.is(out) && range_of(own.data, own.count * call.in_size, rank).is(out);
}

/// True when one of them is exactly its rank's own part of the other.
bool is_in_place(const OverlapCheck& call, const ByteRange& in, const ByteRange& out) {
  if (call.kind == OpKind::all_to_all) return stays(call, in, out);
  if (in.index != out.index || call.accumulate) return false;
  const ByteRange own = own_part(call, in, out);
  const bool gathers = call.kind == OpKind::all_gather || call.kind == OpKind::gather;
  return (gathers ? in : out).is(own);
}

const char* allowed(const OverlapCheck& call) {
  if (call.in.empty()) return "each must have memory of its own";
  if (call.accumulate) return "with accumulate, the output must lie outside of the input";
  switch (call.kind) {
    case OpKind::all_gather:
    case OpKind::gather:
      return "an input may be exactly its rank's own part of the output, and nothing else of it";
    case OpKind::reduce_scatter:
    case OpKind::scatter:
      return "an output may be exactly its rank's own part of the input, and nothing else of it";
    default:
      return "they must not share memory";
  }
}

[[noreturn]] void refuse(const OverlapCheck& call, const std::string& one, const std::string& other) {
  throw InvalidArgument(text(call.what, ": ", one, " and ", other, " overlap; ", allowed(call)));
}

void check_pair(const OverlapCheck& call, const ByteRange& in, const ByteRange& out) {
  if (!in.empty() && !out.empty() && in.overlaps(out) && !is_in_place(call, in, out))
    refuse(call, where("input", in), where("output", out));
}

/// Sorted by address. Throws if two overlap.
const std::vector<ByteRange>& ranges_of_outputs(const OverlapCheck& call) {
  thread_local std::vector<ByteRange> ranges;  // its capacity stays
  ranges.clear();
  for (std::size_t i = 0; i < call.out.size(); ++i) {
    const ByteRange range = range_of(call.out[i].data, call.out[i].count * call.out_size, i);
    if (!range.empty()) ranges.push_back(range);
  }
  const auto by_address = [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), by_address)) std::sort(ranges.begin(), ranges.end(), by_address);
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (!ranges[i - 1].overlaps(ranges[i])) continue;
    const auto [first, second] =
        std::minmax(ranges[i - 1], ranges[i], [](const ByteRange& a, const ByteRange& b) { return a.index < b.index; });
    refuse(call, where("output", first), where("output", second));
  }
  return ranges;
}

}  // namespace

void check_overlap(const OverlapCheck& call) {
  if (call.out.empty()) return;
  const auto range_in = [&](std::size_t i) { return range_of(call.in[i].data, call.in[i].count * call.in_size, i); };
  if (call.out.size() == 1) {
    const ByteRange out = range_of(call.out[0].data, call.out[0].count * call.out_size, 0);
    for (std::size_t i = 0; i < call.in.size(); ++i) check_pair(call, range_in(i), out);
    return;
  }
  const std::vector<ByteRange>& outputs = ranges_of_outputs(call);
  for (std::size_t i = 0; i < call.in.size(); ++i) {
    const ByteRange in = range_in(i);
    auto out =
        std::partition_point(outputs.begin(), outputs.end(), [&](const ByteRange& o) { return o.end <= in.begin; });
    for (; out != outputs.end() && out->begin < in.end; ++out) check_pair(call, in, *out);
  }
}

}  // namespace zcomm::coll
