// See hierarchical_engine.hpp.
#include "coll/hierarchical_engine.hpp"

#include "base/error.hpp"

namespace zcomm::coll {

std::unique_ptr<Communicator> create_hierarchical(std::shared_ptr<net::Mesh>, std::shared_ptr<net::Mesh>,
                                                  std::vector<int>, std::vector<LinkSockets>, HierarchicalOptions) {
  throw Unsupported("hierarchical communicators: not yet");
}

}  // namespace zcomm::coll
