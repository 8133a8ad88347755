// Runs a ring plan over two links: a dull loop (the thinking is in plan.cpp).
#pragma once

#include <span>
#include <vector>

#include "coll/plan.hpp"
#include "net/link.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm::coll {

/// Executes `steps` on `data`. `scratch` must hold the largest recv of a reduce step (same dtype).
/// op avg divides nothing here: the caller scales once at the end. Throws PeerLost, Timeout.
void run_ring(std::span<const RingStep> steps, std::byte* data, DType dtype, ReduceOp op, std::span<std::byte> scratch,
              net::Link& next, net::Link& prev, double timeout_s);

}  // namespace zcomm::coll
