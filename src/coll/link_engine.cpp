// See link_engine.hpp.
#include "coll/link_engine.hpp"

#include "base/error.hpp"

namespace zcomm::coll {

std::unique_ptr<Communicator> create_linked(std::shared_ptr<net::Mesh>, std::vector<LinkSockets>, LinkOptions) {
  throw Unsupported("communicators over links: not yet");
}

}  // namespace zcomm::coll
