// See plan.hpp. Everything here is arithmetic on indices.
#include "coll/plan.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace zcomm::coll {

namespace {

void check_world(int world_size, int rank, std::size_t align) {
  if (world_size < 1) throw InvalidArgument(text("world_size ", world_size, " is less than 1"));
  if (rank < 0 || rank >= world_size) throw InvalidArgument(text("rank ", rank, " is not in [0, ", world_size, ")"));
  if (align == 0) throw InvalidArgument("align is 0");
}

/// The ring's P - 1 steps: step s sends chunk first - s and receives the one before it (modulo P).
std::vector<RingStep> ring(std::size_t count, int world_size, int rank, std::size_t align, int first, bool reduce) {
  check_world(world_size, rank, align);
  const auto chunk = [=](int index) {
    return chunk_of(count, world_size, (index % world_size + world_size) % world_size, align);
  };
  std::vector<RingStep> steps;
  for (int s = 0; s + 1 < world_size; ++s) steps.push_back({chunk(first - s), chunk(first - s - 1), reduce});
  return steps;
}

}  // namespace

Range chunk_of(std::size_t count, int world_size, int rank, std::size_t align) {
  check_world(world_size, rank, align);
  const auto ranks = static_cast<std::size_t>(world_size);
  const std::size_t blocks = count / align + (count % align != 0 ? 1 : 0);
  const auto boundary = [&](std::size_t r) {
    return std::min(count, (r * (blocks / ranks) + std::min(r, blocks % ranks)) * align);
  };
  const auto r = static_cast<std::size_t>(rank);
  return {boundary(r), boundary(r + 1)};
}

std::vector<Range> segments_of(Range range, std::size_t segment) {
  if (segment == 0) throw InvalidArgument("segment is 0");
  std::vector<Range> segments;
  for (std::size_t begin = range.begin; begin < range.end;) {
    const std::size_t end = begin + std::min(segment, range.end - begin);
    segments.push_back({begin, end});
    begin = end;
  }
  return segments;
}

std::vector<RingStep> ring_reduce_scatter(std::size_t count, int world_size, int rank, std::size_t align) {
  // Starts one chunk behind its own, so that its own is the last to arrive.
  return ring(count, world_size, rank, align, rank - 1, true);
}

std::vector<RingStep> ring_all_gather(std::size_t count, int world_size, int rank, std::size_t align) {
  return ring(count, world_size, rank, align, rank, false);
}

std::vector<RingStep> ring_all_reduce(std::size_t count, int world_size, int rank, std::size_t align) {
  std::vector<RingStep> steps = ring_reduce_scatter(count, world_size, rank, align);
  const std::vector<RingStep> gather = ring_all_gather(count, world_size, rank, align);
  steps.insert(steps.end(), gather.begin(), gather.end());
  return steps;
}

}  // namespace zcomm::coll
