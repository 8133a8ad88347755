// The two smallest hand-overs between ranks: a cache line that both spin on, and a futex that one sleeps on.
//
// Thread rule: each rank calls with the same arguments but its own rank; words are shared memory, zero at first.
// Both give up after ten seconds (a rank that is gone) and return NaN.
#pragma once

#include <atomic>
#include <cstdint>

namespace zcomm::bench {

/// One word to itself: two cache lines, as the next-line prefetcher fetches pairs.
struct alignas(128) Word {
  std::atomic<std::uint32_t> value{0};
};

/// Seconds per round trip of `line` between ranks 0 and 1; 0 on the other ranks, which return at once.
double line_round_trip_s(Word& line, int rank, int laps);

/// Seconds per hop of a token that goes round all ranks; each sleeps in the kernel until it comes. `words`: one per
/// rank; `done`: laps of earlier calls, kept by the caller, 0 at first.
double futex_hop_s(Word* words, int rank, int world_size, int laps, std::uint32_t& done);

}  // namespace zcomm::bench
