// The roof of an optimizer step: its reads and writes with next to no arithmetic.
#pragma once

#include <cstddef>

namespace zcomm::bench {

/// Reads p, g, m, v and writes p, m, v, `count` floats each, on `threads` threads; seconds from the moment that all of
/// them run until the last is done (their start is not counted).
/// variant 0: each thread one contiguous range; 1: the threads take tiles of 64 Ki elements in turn.
double adam_stream_s(float* p, const float* g, float* m, float* v, std::size_t count, int threads, int variant);

}  // namespace zcomm::bench
