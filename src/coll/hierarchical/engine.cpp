// The algorithms of [Note: two levels] (engine.hpp); all_reduce.cpp and moves.cpp have the others.
#include "coll/hierarchical/engine.hpp"

#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "coll/hierarchical/ops.hpp"
#include "coll/tcp/private_memory.hpp"
#include "coll/tcp/reduce.hpp"

namespace zcomm::coll {
namespace {

/// Memory of this host's ranks, under their ranks in the world.
class HostBuffer final : public SymmetricBuffer {
 public:
  HostBuffer(std::shared_ptr<SymmetricBuffer> inner, const HostMap& map, int host)
      : inner_(std::move(inner)), map_(map), host_(host) {}
  std::byte* data() override { return inner_->data(); }
  std::byte* peer(int rank) override {
    if (rank < 0 || rank >= map_.world_size())
      throw InvalidArgument(text("peer(", rank, "): expected a rank in [0, ", map_.world_size(), ")"));
    if (map_.host[static_cast<std::size_t>(rank)] != host_)
      throw Unsupported(text("peer(", rank, "): that rank runs on another host"));
    return inner_->peer(map_.local_rank[static_cast<std::size_t>(rank)]);
  }
  std::size_t nbytes() const override { return inner_->nbytes(); }

 private:
  std::shared_ptr<SymmetricBuffer> inner_;
  const HostMap map_;
  const int host_;
};

}  // namespace

void HierarchicalEngine::work(Operation& operation) {
  const Signature& signature = operation.signature;
  items_ = operation.items.all();
  switch (signature.kind) {
    case OpKind::all_reduce:
      return all_reduce(signature, items_);
    case OpKind::reduce:
      return reduce(signature, items_);
    case OpKind::reduce_scatter:
      return reduce_scatter(operation, items_);
    case OpKind::all_gather:
      return all_gather(signature, items_);
    case OpKind::broadcast:
      return broadcast(signature);
    case OpKind::gather:
      return gather(signature, items_);
    case OpKind::scatter:
      return scatter(signature, items_);
    case OpKind::all_to_all:
      return all_to_all(signature, items_);
    case OpKind::allocate:
    case OpKind::allocate_shared:
      return allocate(operation);
    default:
      return compare_between_hosts();  // after the host's entry, that is a barrier
  }
}

/// Sums of the host, in rank order of its ranks, are exact; between hosts they travel encoded.
void HierarchicalEngine::add_encoded(const Operation& operation, std::byte* sums) {
  const int host = topology_.host(), hosts = static_cast<int>(hosts_);
  EncodedCall call = call_of(operation, world_size(), ++encoded_calls_);
  call.dtype = DType::float32;
  encoded_tensors_.clear();
  const std::span<const Item> items = operation.items.all();
  std::size_t at = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    encoded_tensors_.push_back({.in = sums + at * hosts_ * sizeof(float),
                                .out = items[i].out,
                                .count = items[i].count * hosts_,
                                .step = items[i].count,
                                .error = operation.coding.items[i].error});
    at += items[i].count;
  }
  const std::span<const Item> parts = encoded_.scatter(call, encoded_tensors_, host, hosts);
  topology_.begin(OpKind::all_to_all, DType::uint8);
  for (const Item& part : parts) topology_.add(part);
  topology_.run_between_hosts();
  encoded_.add(call, encoded_tensors_, host, hosts);
}

void HierarchicalEngine::reduce_scatter(const Operation& operation, std::span<const Item> items) {
  const Signature& signature = operation.signature;
  TcpReduce reduce(signature, world_size());
  const DType wide = reduce.partial();
  const ReduceOp op = signature.op == ReduceOp::avg ? ReduceOp::sum : signature.op;
  const std::size_t size = size_of(signature.dtype), wide_size = size_of(wide), total = total_of(items);
  const bool in_blocks = topology_.map().in_blocks;
  std::byte* const sums = first_.room(total * hosts_ * wide_size + total * wide_size);  // [item][host], own result
  std::byte* const result = sums + total * hosts_ * wide_size;
  std::byte* const packed = in_blocks ? nullptr : second_.room(total * hosts_ * local_world_size_ * size);

  topology_.begin(OpKind::reduce_scatter, signature.dtype, wide, op);
  std::size_t at = 0;
  for (const Item& item : items) {
    const std::byte* in = item.in;
    if (!in_blocks) {
      std::byte* const to = packed + at * hosts_ * local_world_size_ * size;
      for (std::size_t h = 0; h < hosts_; ++h)
        for (std::size_t p = 0; p < local_world_size_; ++p)
          copy_bytes(to + (h * local_world_size_ + p) * item.count * size, item.in + rank_at(h, p) * item.count * size,
                     item.count * size);
      in = to;
    }
    for (std::size_t h = 0; h < hosts_; ++h)
      topology_.add({.in = in + h * local_world_size_ * item.count * size,
                     .out = sums + (at * hosts_ + h * item.count) * wide_size,
                     .count = item.count,
                     .in_home = in_blocks ? item.in_home : nullptr});
    at += item.count;
  }
  topology_.keep_buffers(in_blocks, false);
  topology_.run_on_host();
  if (signature.coding != 0) return add_encoded(operation, sums);

  topology_.begin(OpKind::reduce_scatter, wide, wide, op);
  at = 0;
  for (const Item& item : items) {
    topology_.add({.in = sums + at * hosts_ * wide_size, .out = result + at * wide_size, .count = item.count});
    at += item.count;
  }
  topology_.run_between_hosts();
  at = 0;
  for (const Item& item : items) {
    if (item.count > 0) reduce.finish(item.out, result + at * wide_size, item.count);
    at += item.count;
  }
}

void HierarchicalEngine::all_gather(const Signature& signature, std::span<const Item> items) {
  const std::size_t size = size_of(signature.dtype), total = total_of(items);
  const bool in_blocks = topology_.map().in_blocks;
  std::byte* const group = first_.room(total * hosts_ * size);  // [item][host]
  std::byte* const packed = in_blocks ? nullptr : second_.room(total * hosts_ * local_world_size_ * size);

  topology_.begin(OpKind::all_gather, signature.dtype);
  std::size_t at = 0;
  for (const Item& item : items) {
    topology_.add({.in = item.in, .out = group + at * hosts_ * size, .count = item.count});
    at += item.count;
  }
  topology_.run_between_hosts();

  topology_.begin(OpKind::all_gather, signature.dtype);
  at = 0;
  for (const Item& item : items) {
    std::byte* const out = in_blocks ? item.out : packed + at * hosts_ * local_world_size_ * size;
    for (std::size_t h = 0; h < hosts_; ++h)
      topology_.add({.in = group + (at * hosts_ + h * item.count) * size,
                     .out = out + h * local_world_size_ * item.count * size,
                     .count = item.count,
                     .out_home = in_blocks ? item.out_home : nullptr});
    at += item.count;
  }
  topology_.keep_buffers(false, in_blocks);
  topology_.run_on_host();
  at = 0;
  for (const Item& item : items) {
    for (std::size_t h = 0; h < hosts_ && !in_blocks; ++h)
      for (std::size_t p = 0; p < local_world_size_; ++p)
        copy_bytes(item.out + rank_at(h, p) * item.count * size,
                   packed + (at * hosts_ * local_world_size_ + (h * local_world_size_ + p) * item.count) * size,
                   item.count * size);
    at += item.count;
  }
}

void HierarchicalEngine::broadcast(const Signature& signature) {
  const auto all = [&](int root) {
    topology_.begin(OpKind::broadcast, signature.dtype, root);
    for (const Item& item : items_) topology_.add(item);
    topology_.keep_buffers(true, true);
  };
  if (topology_.local_rank() == local_rank_of(signature.root)) {
    all(host_of(signature.root));
    topology_.run_between_hosts();
  } else {
    compare_between_hosts();
  }
  all(local_rank_of(signature.root));
  topology_.run_on_host();
}

/// A refusal on one host is a refusal on all.
void HierarchicalEngine::allocate(Operation& operation) {
  AllocateResult& result = *operation.allocate;
  const bool shared = operation.signature.kind == OpKind::allocate_shared;
  if (shared && hosts_ > 1) {
    compare_between_hosts();
    result.refused =
        std::make_exception_ptr(Unsupported("allocate_shared: the ranks run on several hosts, which share no memory"));
    return;
  }
  Operation& part = topology_.begin(operation.signature.kind, DType::uint8);
  part.signature.count = operation.signature.count;
  part.allocate = &result;
  topology_.run_on_host();
  std::int32_t refused = result.refused ? 1 : 0;
  topology_.begin(OpKind::all_reduce, DType::int32, DType::int32, ReduceOp::max);
  auto* const flag = reinterpret_cast<std::byte*>(&refused);
  topology_.add({.in = flag, .out = flag, .count = 1});
  topology_.run_between_hosts();
  if (result.buffer && refused == 0) {
    result.buffer = std::make_shared<HostBuffer>(std::move(result.buffer), topology_.map(), topology_.host());
  } else if (result.buffer) {
    result.buffer.reset();
    result.refused = std::make_exception_ptr(AllocationRefused(
        ENOMEM, text("allocating ", operation.signature.count, " bytes was refused on another host")));
  }
}

std::unique_ptr<Communicator> create_hierarchical(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<net::Mesh> host_mesh,
                                                  std::vector<int> host_of_rank, std::vector<PeerSockets> links,
                                                  HierarchicalOptions options) {
  if (!mesh || !host_mesh) throw InvalidArgument("create_hierarchical: no mesh");
  if (host_of_rank.size() != static_cast<std::size_t>(mesh->world_size()))
    throw InvalidArgument(text("hosts of ", host_of_rank.size(), " ranks; the mesh has ", mesh->world_size()));
  const HostMap map(host_of_rank);
  const auto rank = static_cast<std::size_t>(mesh->rank());
  if (host_mesh->world_size() != map.local_world_size() || host_mesh->rank() != map.local_rank[rank])
    throw InvalidArgument(text("rank ", rank, " has local rank ", map.local_rank[rank], " of ", map.local_world_size(),
                               " on its host, but rank ", host_mesh->rank(), " of ", host_mesh->world_size(),
                               " in the mesh of that host"));
  std::vector<bool> wanted;
  for (std::size_t r = 0; r < links.size() && r < map.local_rank.size(); ++r)
    wanted.push_back(r != rank && map.local_rank[r] == map.local_rank[rank]);
  check_links(links, wanted, mesh->rank(), true);
  const auto shared = std::make_shared<std::vector<PeerSockets>>(std::move(links));  // a factory must be copyable
  return make_communicator(once(
      [mesh = std::move(mesh), host_mesh = std::move(host_mesh), map, shared, options](SymmetricMemory& symmetric) {
        return std::make_unique<HierarchicalEngine>(mesh, host_mesh, map, std::move(*shared), options, symmetric);
      }));
}

}  // namespace zcomm::coll
