// See topology.hpp.
#include "coll/hierarchical/topology.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.hpp"
#include "base/interrupt.hpp"

namespace zcomm::coll {
namespace {

constexpr double kCertainty_s = 0.5;  // for the arrival of the failure that ended the other level

CommOptions host_options(const HierarchicalOptions& options) {
  CommOptions host;
  host.timeout_s = options.link.timeout_s;
  host.limit_s = options.link.limit_s;
  host.warn_s = options.link.warn_s;
  host.slot_nbytes = options.slot_nbytes;
  host.slot_count = options.slot_count;
  return host;
}

}  // namespace

HostMap::HostMap(const std::vector<int>& host_of_rank) : local_rank(host_of_rank.size()) {
  std::map<int, std::vector<int>> by_host;
  for (std::size_t r = 0; r < host_of_rank.size(); ++r) by_host[host_of_rank[r]].push_back(static_cast<int>(r));
  host.resize(host_of_rank.size());
  for (const auto& [name, members] : by_host) {
    for (std::size_t p = 0; p < members.size(); ++p) {
      host[static_cast<std::size_t>(members[p])] = static_cast<int>(ranks.size());
      local_rank[static_cast<std::size_t>(members[p])] = static_cast<int>(p);
    }
    ranks.push_back(members);
  }
  for (std::size_t h = 0; h < ranks.size(); ++h) {
    if (ranks[h].size() != ranks[0].size())
      throw InvalidArgument(text("host 0 has ", ranks[0].size(), " ranks and host ", h, " has ", ranks[h].size(),
                                 "; a hierarchical communicator needs as many on each (use only links)"));
    for (std::size_t p = 0; p < ranks[h].size(); ++p)
      in_blocks &= ranks[h][p] == static_cast<int>(h * ranks[0].size() + p);
  }
}

Topology::Topology(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<net::Mesh> host_mesh, HostMap map,
                   std::vector<PeerSockets> links, const HierarchicalOptions& options, SymmetricMemory& symmetric)
    : mesh_(std::move(mesh)),
      map_(std::move(map)),
      rank_(mesh_->rank()),
      host_engine_(std::move(host_mesh), host_options(options), symmetric),
      group_(mesh_, group_members(), std::move(links), options.link),
      gathered_(static_cast<std::size_t>(map_.local_world_size())) {
  host_engine_.set_context([this] { return context(); });
}

std::string Topology::context() const {
  return text(describe(signature_), " (operation ", signature_.sequence, "), among ranks ",
              net::list_ranks(map_.ranks[static_cast<std::size_t>(host())]), " of one host, there counted from 0: ");
}

std::vector<int> Topology::group_members() const {
  std::vector<int> members;
  for (int h = 0; h < map_.hosts(); ++h)
    members.push_back(map_.rank(static_cast<std::size_t>(h), static_cast<std::size_t>(local_rank())));
  return members;
}

void Topology::start(Operation& part, OpKind kind, DType dtype, DType out_dtype, ReduceOp op, int root) const {
  part.items.clear();
  part.signature = Signature{};
  Signature& signature = part.signature;
  signature.kind = kind, signature.dtype = dtype, signature.out_dtype = out_dtype, signature.op = op,
  signature.root = root;
  if (reduces(kind)) signature.order = signature_.order;
}

Operation& Topology::begin(OpKind kind, DType dtype, DType out_dtype, ReduceOp op, int root) {
  start(part_, kind, dtype, out_dtype, op, root);
  keep_in_ = keep_out_ = false;
  return part_;
}

void Topology::all_reduce_between_hosts(const Item& item, DType dtype, ReduceOp op) {
  start(between_, OpKind::all_reduce, dtype, dtype, op, -1);
  SpareItems none;
  between_.items.add(item, none);
  count_items(between_.signature, between_.items.all(), host(), map_.hosts());
  group_.run(between_, &signature_);
}

void Topology::run_part(int own, int ranks) {
  Signature& signature = part_.signature;
  signature.place_in = keep_in_ ? signature_.place_in : 0;
  signature.place_out = keep_out_ ? signature_.place_out : 0;
  count_items(signature, part_.items.all(), own, ranks);
}

void Topology::enter(Operation& operation) {
  operation.signature.sequence = ++sequence_;
  signature_ = operation.signature;
  group_.failure().throw_if_set(describe(signature_));
  group_.control().set_entered(signature_);
  begin(OpKind::all_gather, DType::uint8);
  Item item;
  item.in = reinterpret_cast<const std::byte*>(&signature_);
  item.out = reinterpret_cast<std::byte*>(gathered_.data());
  item.count = sizeof(Signature);
  add(item);
  run_on_host();
  require_same(
      map_.local_world_size(), [this](int p) -> const Signature& { return gathered_[static_cast<std::size_t>(p)]; },
      map_.ranks[static_cast<std::size_t>(host())]);
}

void Topology::fail() {
  const std::string during = text(describe(signature_), " (operation ", signature_.sequence, ")");
  TcpFailure& failure = group_.failure();
  const auto wait_for_news = [&] {
    std::vector<pollfd> news{{failure.event(), POLLIN, 0}};
    for (const net::Deadline certainty(kCertainty_s); !failure.is_set() && !certainty.passed();)
      net::wait_for(news, certainty);
  };
  const auto& beside = map_.ranks[static_cast<std::size_t>(host())];
  try {
    throw;
  } catch (const CollectiveMismatch& error) {
    group_.fail(net::Cause::mismatch, rank_, error.what());
  } catch (const Interrupted&) {
    group_.fail(net::Cause::left, rank_, {});
    host_engine_.close();
    throw;
  } catch (const PeerLost& error) {  // either the first rank that failed, or one on this host that knows of it
    wait_for_news();
    const bool on_host = error.rank >= 0 && error.rank < map_.local_world_size();
    const int lost = on_host ? beside[static_cast<std::size_t>(error.rank)] : error.rank;
    group_.fail(net::cause_of(mesh_->fate(lost)), lost, {});  // if it is alive, its communicator is closed
  } catch (const Timeout& error) {
    group_.fail(net::Cause::late, rank_, text(context(), error.what()));
  } catch (const std::exception& error) {
    if (group_.sockets().is_closing())
      group_.fail(net::Cause::left, rank_, {});
    else
      group_.fail(net::Cause::failed, rank_, text(during, ": ", error.what()));
  }
  host_engine_.close();  // ends the waits of other ranks on this host
  failure.throw_if_set(during);
  throw;
}

void Topology::close() noexcept {
  group_.close();
  host_engine_.close();
}

}  // namespace zcomm::coll
