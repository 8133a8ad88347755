// See engine.hpp.
#include "coll/tcp/engine.hpp"

#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "coll/tcp/group.hpp"
#include "coll/tcp/private_memory.hpp"

namespace zcomm::coll {
namespace {

class TcpEngine final : public Engine {
 public:
  TcpEngine(std::shared_ptr<net::Mesh> mesh, std::vector<PeerSockets> links, const TcpOptions& options,
            SymmetricMemory& memory)
      : memory_(memory),
        longest_s_(times_of(options).longest_s()),
        group_(mesh, all_ranks(mesh->world_size()), std::move(links), options) {}

  int rank() const override { return group_.rank(); }
  int world_size() const override { return group_.world_size(); }
  Messenger& messenger() override { return group_.messenger(); }
  void fail(const std::string& why) noexcept override { group_.fail(net::Cause::failed, rank(), why); }
  void close() noexcept override { group_.close(); }
  void suspend_deadline(bool suspended) override { group_.suspend_deadline(suspended); }
  double longest_s() const override { return longest_s_; }
  std::size_t nbytes() const override { return group_.nbytes(); }

  void run(Operation& operation) override {
    group_.run(operation);
    const OpKind kind = operation.signature.kind;
    if (kind == OpKind::allocate_shared && world_size() > 1)
      operation.allocate->refused = std::make_exception_ptr(
          Unsupported("allocate_shared: ranks that are joined only by sockets share no memory"));
    else if (kind == OpKind::allocate || kind == OpKind::allocate_shared)
      operation.allocate->buffer = make_private_buffer(operation.signature.count, rank(), memory_);
  }

 private:
  static std::vector<int> all_ranks(int world_size) {
    std::vector<int> ranks(static_cast<std::size_t>(world_size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  SymmetricMemory& memory_;
  const double longest_s_;
  TcpGroup group_;
};

}  // namespace

std::unique_ptr<Communicator> create_linked(std::shared_ptr<net::Mesh> mesh, std::vector<PeerSockets> links,
                                            TcpOptions options) {
  if (!mesh) throw InvalidArgument("create_linked: no mesh");
  std::vector<bool> wanted(static_cast<std::size_t>(mesh->world_size()), true);
  wanted[static_cast<std::size_t>(mesh->rank())] = false;
  check_links(links, wanted, mesh->rank(), false);
  const auto shared = std::make_shared<std::vector<PeerSockets>>(std::move(links));  // a factory must be copyable
  return make_communicator(once([mesh = std::move(mesh), shared, options](SymmetricMemory& memory) {
    return std::make_unique<TcpEngine>(mesh, std::move(*shared), options, memory);
  }));
}

}  // namespace zcomm::coll
