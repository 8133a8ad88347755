// The measurements of zcomm_bench; each returns the exit code of a rank.
#pragma once

#include "options.hpp"
#include "world.hpp"

namespace zcomm::bench {

/// Blocking all_reduce (fp32 sum) by size, and barrier, next to MPI, the cache line and the futex. Collective.
int latency(const Options& options, Rank& self);

/// The guard's cost: its pieces (on one rank), and whole calls with and without it. Collective.
int guard(const Options& options, Rank& self);

}  // namespace zcomm::bench
