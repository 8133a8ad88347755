// Shared by engines over links: private memory behind a SymmetricBuffer, and checks of their arguments.
#pragma once

#include <memory>
#include <vector>

#include "coll/engine.hpp"
#include "coll/symmetric_memory.hpp"
#include "coll/tcp/engine.hpp"

namespace zcomm::coll {

/// Zeroed, page aligned, accounted for in `memory`; peer(other) throws Unsupported. Throws SystemError when memory is
/// refused.
std::shared_ptr<SymmetricBuffer> make_private_buffer(std::size_t nbytes, int rank, SymmetricMemory& memory);

/// Throws InvalidArgument unless each wanted rank has two links or more, and each other one none, or one if
/// `allow_one`.
void check_links(const std::vector<PeerSockets>& links, const std::vector<bool>& wanted, int rank, bool allow_one);

/// A factory that makes one engine, and throws Unsupported from duplicate().
EngineFactory once(std::function<std::unique_ptr<Engine>(SymmetricMemory&)> make);

}  // namespace zcomm::coll
