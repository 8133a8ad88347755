// The algorithms of [Note: two levels] (hierarchical_engine.hpp).
#include "coll/hierarchical_engine.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "coll/link_memory.hpp"
#include "coll/link_reduce.hpp"
#include "coll/two_levels.hpp"

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
    return inner_->peer(map_.place[static_cast<std::size_t>(rank)]);
  }
  std::size_t nbytes() const override { return inner_->nbytes(); }

 private:
  std::shared_ptr<SymmetricBuffer> inner_;
  const HostMap map_;
  const int host_;
};

/// Memory of an algorithm, kept for the next operation.
class Scratch {
 public:
  std::byte* room(std::size_t nbytes) {
    if (bytes_.size() <= nbytes) bytes_.resize(nbytes + 1);  // never null
    return bytes_.data();
  }
  std::size_t nbytes() const { return bytes_.capacity(); }

 private:
  std::vector<std::byte> bytes_;
};

void copy_bytes(std::byte* to, const std::byte* from, std::size_t nbytes) {
  if (nbytes > 0 && to != from) std::memmove(to, from, nbytes);
}

class HierarchicalEngine final : public Engine {
 public:
  HierarchicalEngine(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<net::Mesh> host_mesh, HostMap map,
                     std::vector<LinkSockets> links, const HierarchicalOptions& options, SymmetricMemory& symmetric)
      : two_(std::move(mesh), std::move(host_mesh), std::move(map), std::move(links), options, symmetric),
        hosts_(static_cast<std::size_t>(two_.map().hosts())),
        places_(static_cast<std::size_t>(two_.map().places())) {}

  int rank() const override { return two_.rank(); }
  int world_size() const override { return two_.map().world_size(); }
  Messenger& messenger() override { return two_.group().messenger(); }
  void close() noexcept override { two_.close(); }
  void suspend_deadline(bool suspended) override {
    two_.host_engine().suspend_deadline(suspended);
    two_.group().suspend_deadline(suspended);
  }
  std::size_t nbytes() const override {
    return two_.host_engine().nbytes() + two_.group().nbytes() + first_.nbytes() + second_.nbytes() + tails_.nbytes();
  }

  void run(Operation& operation) override {
    try {
      two_.enter(operation);
      work(operation);
    } catch (...) {
      two_.fail();
    }
  }

 private:
  void work(Operation& operation);
  void all_reduce(const Header& header, std::span<const Item> items);
  void reduce(const Header& header, std::span<const Item> items);
  void reduce_scatter(const Header& header, std::span<const Item> items);
  void all_gather(const Header& header, std::span<const Item> items);
  void broadcast(const Header& header);
  void gather(const Header& header, std::span<const Item> items);
  void scatter(const Header& header, std::span<const Item> items);
  void all_to_all(const Header& header, std::span<const Item> items);
  void allocate(Operation& operation);
  void compare_between_hosts() {
    two_.begin(OpKind::barrier, DType::u8);
    two_.run_between_hosts();
  }
  int host_of(int rank) const { return two_.map().host[static_cast<std::size_t>(rank)]; }
  int place_of(int rank) const { return two_.map().place[static_cast<std::size_t>(rank)]; }
  std::size_t rank_at(std::size_t host, std::size_t place) const {
    return static_cast<std::size_t>(two_.map().rank(host, place));
  }

  TwoLevels two_;
  const std::size_t hosts_, places_;
  Scratch first_, second_, tails_;
  std::span<const Item> items_;
};

void HierarchicalEngine::work(Operation& operation) {
  const Header& header = operation.header;
  items_ = operation.items.all();
  switch (header.kind) {
    case OpKind::all_reduce:
      return all_reduce(header, items_);
    case OpKind::reduce:
      return reduce(header, items_);
    case OpKind::reduce_scatter:
      return reduce_scatter(header, items_);
    case OpKind::all_gather:
      return all_gather(header, items_);
    case OpKind::broadcast:
      return broadcast(header);
    case OpKind::gather:
      return gather(header, items_);
    case OpKind::scatter:
      return scatter(header, items_);
    case OpKind::all_to_all:
      return all_to_all(header, items_);
    case OpKind::allocate:
    case OpKind::allocate_shared:
      return allocate(operation);
    default:
      return compare_between_hosts();  // after the host's entry, that is a barrier
  }
}

std::size_t total_of(std::span<const Item> items) {
  std::size_t total = 0;
  for (const Item& item : items) total += item.count;
  return total;
}

/// What does not divide by the places of a host (less than that of each tensor) goes along as one more tensor.
void HierarchicalEngine::all_reduce(const Header& header, std::span<const Item> items) {
  LinkReduce reduce(header, world_size());
  const DType wide = reduce.partial();
  const ReduceOp op = header.op == ReduceOp::avg ? ReduceOp::sum : header.op;
  const std::size_t size = size_of(header.dtype), wide_size = size_of(wide),
                    me = static_cast<std::size_t>(two_.place());
  std::size_t parts = 0, rest = 0;
  for (const Item& item : items) parts += item.count / places_, rest += item.count % places_;
  const std::size_t rest_part = (rest + places_ - 1) / places_;
  std::byte* const tails = tails_.room(rest_part * places_ * size);
  std::memset(tails, 0, rest_part * places_ * size);
  std::byte* const own = first_.room((parts + rest_part) * wide_size);

  const auto each_tail = [&](const auto& visit) {
    std::size_t at = 0;
    for (const Item& item : items) {
      const std::size_t count = item.count % places_;
      visit(item.out + (item.count - count) * size, tails + at * size, count * size);
      at += count;
    }
  };
  // visit(begin of all parts, own part's results, elements of a part, home)
  const auto each_part = [&](const auto& visit) {
    std::size_t at = 0;
    for (const Item& item : items) {
      visit(item.out, own + at * wide_size, item.count / places_, item.out_home);
      at += item.count / places_;
    }
    if (rest > 0) visit(tails, own + at * wide_size, rest_part, nullptr);
  };

  each_tail([](std::byte* tensor, std::byte* tail, std::size_t nbytes) { copy_bytes(tail, tensor, nbytes); });
  two_.begin(OpKind::reduce_scatter, header.dtype, wide, op);
  each_part([&](std::byte* whole, std::byte* part, std::size_t count, const Allocation* home) {
    two_.add({.in = whole, .out = part, .count = count, .in_home = home});
  });
  two_.keep_places(rest == 0, false);
  two_.run_on_host();

  two_.begin(OpKind::all_reduce, wide, wide, op);
  two_.add({.in = own, .out = own, .count = parts + rest_part});
  two_.run_between_hosts();

  each_part([&](std::byte* whole, std::byte* part, std::size_t count, const Allocation*) {
    if (count > 0) reduce.finish(whole + me * count * size, part, count);
  });
  two_.begin(OpKind::all_gather, header.dtype);
  each_part([&](std::byte* whole, std::byte*, std::size_t count, const Allocation* home) {
    two_.add({.in = whole + me * count * size, .out = whole, .count = count, .in_home = home, .out_home = home});
  });
  two_.keep_places(false, rest == 0);
  two_.run_on_host();
  each_tail([](std::byte* tensor, std::byte* tail, std::size_t nbytes) { copy_bytes(tensor, tail, nbytes); });
}

void HierarchicalEngine::reduce(const Header& header, std::span<const Item> items) {
  const std::size_t size = size_of(header.dtype), total = total_of(items);
  std::byte* const sums = second_.room(total * size);
  std::size_t at = 0;
  for (const Item& item : items) copy_bytes(sums + at * size, item.in, item.count * size), at += item.count;
  const Item whole{.in = sums, .out = sums, .count = total};
  all_reduce(header, {&whole, 1});
  if (header.root != rank()) return;
  at = 0;
  for (const Item& item : items) copy_bytes(item.out, sums + at * size, item.count * size), at += item.count;
}

void HierarchicalEngine::reduce_scatter(const Header& header, std::span<const Item> items) {
  LinkReduce reduce(header, world_size());
  const DType wide = reduce.partial();
  const ReduceOp op = header.op == ReduceOp::avg ? ReduceOp::sum : header.op;
  const std::size_t size = size_of(header.dtype), wide_size = size_of(wide), total = total_of(items);
  const bool in_blocks = two_.map().in_blocks;
  std::byte* const sums = first_.room(total * hosts_ * wide_size + total * wide_size);  // [item][host], own result
  std::byte* const result = sums + total * hosts_ * wide_size;
  std::byte* const packed = in_blocks ? nullptr : second_.room(total * hosts_ * places_ * size);

  two_.begin(OpKind::reduce_scatter, header.dtype, wide, op);
  std::size_t at = 0;
  for (const Item& item : items) {
    const std::byte* in = item.in;
    if (!in_blocks) {
      std::byte* const to = packed + at * hosts_ * places_ * size;
      for (std::size_t h = 0; h < hosts_; ++h)
        for (std::size_t p = 0; p < places_; ++p)
          copy_bytes(to + (h * places_ + p) * item.count * size, item.in + rank_at(h, p) * item.count * size,
               item.count * size);
      in = to;
    }
    for (std::size_t h = 0; h < hosts_; ++h)
      two_.add({.in = in + h * places_ * item.count * size,
                .out = sums + (at * hosts_ + h * item.count) * wide_size,
                .count = item.count,
                .in_home = in_blocks ? item.in_home : nullptr});
    at += item.count;
  }
  two_.keep_places(in_blocks, false);
  two_.run_on_host();

  two_.begin(OpKind::reduce_scatter, wide, wide, op);
  at = 0;
  for (const Item& item : items) {
    two_.add({.in = sums + at * hosts_ * wide_size, .out = result + at * wide_size, .count = item.count});
    at += item.count;
  }
  two_.run_between_hosts();
  at = 0;
  for (const Item& item : items) {
    if (item.count > 0) reduce.finish(item.out, result + at * wide_size, item.count);
    at += item.count;
  }
}

void HierarchicalEngine::all_gather(const Header& header, std::span<const Item> items) {
  const std::size_t size = size_of(header.dtype), total = total_of(items);
  const bool in_blocks = two_.map().in_blocks;
  std::byte* const group = first_.room(total * hosts_ * size);  // [item][host]
  std::byte* const packed = in_blocks ? nullptr : second_.room(total * hosts_ * places_ * size);

  two_.begin(OpKind::all_gather, header.dtype);
  std::size_t at = 0;
  for (const Item& item : items) {
    two_.add({.in = item.in, .out = group + at * hosts_ * size, .count = item.count});
    at += item.count;
  }
  two_.run_between_hosts();

  two_.begin(OpKind::all_gather, header.dtype);
  at = 0;
  for (const Item& item : items) {
    std::byte* const out = in_blocks ? item.out : packed + at * hosts_ * places_ * size;
    for (std::size_t h = 0; h < hosts_; ++h)
      two_.add({.in = group + (at * hosts_ + h * item.count) * size,
                .out = out + h * places_ * item.count * size,
                .count = item.count,
                .out_home = in_blocks ? item.out_home : nullptr});
    at += item.count;
  }
  two_.keep_places(false, in_blocks);
  two_.run_on_host();
  at = 0;
  for (const Item& item : items) {
    for (std::size_t h = 0; h < hosts_ && !in_blocks; ++h)
      for (std::size_t p = 0; p < places_; ++p)
        copy_bytes(item.out + rank_at(h, p) * item.count * size,
             packed + (at * hosts_ * places_ + (h * places_ + p) * item.count) * size, item.count * size);
    at += item.count;
  }
}

void HierarchicalEngine::broadcast(const Header& header) {
  const auto all = [&](int root) {
    two_.begin(OpKind::broadcast, header.dtype, root);
    for (const Item& item : items_) two_.add(item);
    two_.keep_places(true, true);
  };
  if (two_.place() == place_of(header.root)) {
    all(host_of(header.root));
    two_.run_between_hosts();
  } else {
    compare_between_hosts();
  }
  all(place_of(header.root));
  two_.run_on_host();
}

void HierarchicalEngine::gather(const Header& header, std::span<const Item> items) {
  const std::size_t size = size_of(header.dtype), total = total_of(items), row = total * hosts_;
  const bool at_root = two_.host() == host_of(header.root);
  std::byte* const group = first_.room(row * size);  // [item][host], on the root's host
  two_.begin(OpKind::gather, header.dtype, host_of(header.root));
  std::size_t at = 0;
  for (const Item& item : items) {
    two_.add({.in = item.in, .out = at_root ? group + at * hosts_ * size : nullptr, .count = item.count});
    at += item.count;
  }
  two_.run_between_hosts();
  if (!at_root) return;
  std::byte* const all = second_.room(row * places_ * size);  // [place][item][host]
  two_.begin(OpKind::all_gather, header.dtype);
  two_.add({.in = group, .out = all, .count = row});
  two_.run_on_host();
  at = 0;
  for (const Item& item : items) {
    for (std::size_t h = 0; h < hosts_ && header.root == rank(); ++h)
      for (std::size_t p = 0; p < places_; ++p)
        copy_bytes(item.out + rank_at(h, p) * item.count * size, all + (p * row + at * hosts_ + h * item.count) * size,
             item.count * size);
    at += item.count;
  }
}

void HierarchicalEngine::scatter(const Header& header, std::span<const Item> items) {
  const std::size_t size = size_of(header.dtype), total = total_of(items), row = total * hosts_;
  const bool at_root = two_.host() == host_of(header.root);
  std::byte* const all = second_.room(at_root ? row * places_ * size : 0);  // [place][item][host]
  std::size_t at = 0;
  if (header.root == rank()) {
    for (const Item& item : items) {
      for (std::size_t h = 0; h < hosts_; ++h)
        for (std::size_t p = 0; p < places_; ++p)
          copy_bytes(all + (p * row + at * hosts_ + h * item.count) * size, item.in + rank_at(h, p) * item.count * size,
               item.count * size);
      at += item.count;
    }
  }
  if (at_root) {
    two_.begin(OpKind::broadcast, header.dtype, place_of(header.root));
    two_.add({.in = all, .out = all, .count = row * places_});
    two_.run_on_host();
  }
  const std::byte* const mine = all + (at_root ? static_cast<std::size_t>(two_.place()) * row * size : 0);
  two_.begin(OpKind::scatter, header.dtype, host_of(header.root));
  at = 0;
  for (const Item& item : items) {
    two_.add({.in = at_root ? mine + at * hosts_ * size : nullptr, .out = item.out, .count = item.count});
    at += item.count;
  }
  two_.run_between_hosts();
}

/// Everybody learns all counts first: so all find the same mismatch, and know what comes by way of whom.
void HierarchicalEngine::all_to_all(const Header& header, std::span<const Item> items) {
  const std::size_t world = hosts_ * places_, row = 2 * world;
  const auto host = static_cast<std::size_t>(two_.host()), place = static_cast<std::size_t>(two_.place());
  std::vector<std::uint64_t> mine(row), beside(row * places_), all(row * world);  // all: [host][place]
  for (std::size_t q = 0; q < world; ++q) mine[q] = items[q].count, mine[world + q] = items[q].out_count;
  const auto bytes = [](std::vector<std::uint64_t>& from) { return reinterpret_cast<std::byte*>(from.data()); };
  two_.begin(OpKind::all_gather, DType::i64);
  two_.add({.in = bytes(mine), .out = bytes(beside), .count = row});
  two_.run_on_host();
  two_.begin(OpKind::all_gather, DType::i64);
  two_.add({.in = bytes(beside), .out = bytes(all), .count = row * places_});
  two_.run_between_hosts();
  const auto row_of = [&](std::size_t h, std::size_t p) { return all.data() + (h * places_ + p) * row; };
  const auto row_of_rank = [&](std::size_t r) {
    return row_of(static_cast<std::size_t>(host_of(static_cast<int>(r))),
                  static_cast<std::size_t>(place_of(static_cast<int>(r))));
  };
  for (std::size_t from = 0; from < world; ++from)
    for (std::size_t to = 0; to < world; ++to)
      if (row_of_rank(from)[to] != row_of_rank(to)[world + from])
        throw CollectiveMismatch(text(describe(header), ": rank ", from, " sends ", row_of_rank(from)[to],
                                      " elements to rank ", to, ", which expects ", row_of_rank(to)[world + from]));

  // On the host: to each place what is for that place of any host. Then between hosts, from all places together.
  const std::size_t size = size_of(header.dtype);
  const auto count = [&](std::size_t h, std::size_t p, std::size_t to_h, std::size_t to_p) {
    return static_cast<std::size_t>(row_of(h, p)[rank_at(to_h, to_p)]);
  };
  std::size_t sent = 0, passed = 0, came = 0;
  for (std::size_t h = 0; h < hosts_; ++h)
    for (std::size_t p = 0; p < places_; ++p)
      sent += count(host, place, h, p), passed += count(host, p, h, place), came += count(h, p, host, place);
  std::byte* out = first_.room((sent + passed) * size);
  std::byte* in = out + sent * size;
  two_.begin(OpKind::all_to_all, header.dtype);
  for (std::size_t p = 0; p < places_; ++p) {
    Item item{.in = out, .out = in};
    for (std::size_t h = 0; h < hosts_; ++h) {
      const std::size_t n = count(host, place, h, p);
      copy_bytes(out, items[rank_at(h, p)].in, n * size);
      out += n * size;
      item.count += n;
      item.out_count += count(host, p, h, place);
    }
    in += item.out_count * size;
    two_.add(item);
  }
  two_.run_on_host();

  std::byte* group_out = second_.room((passed + came) * size);
  std::byte* group_in = group_out + passed * size;
  two_.begin(OpKind::all_to_all, header.dtype);
  for (std::size_t h = 0; h < hosts_; ++h) {
    Item item{.in = group_out, .out = group_in};
    const std::byte* from = first_.room(0) + sent * size;  // [place][host]
    for (std::size_t p = 0; p < places_; ++p) {
      for (std::size_t to = 0; to < hosts_; ++to) {
        const std::size_t n = count(host, p, to, place);
        if (to == h) {
          copy_bytes(group_out, from, n * size);
          group_out += n * size;
          item.count += n;
        }
        from += n * size;
      }
      item.out_count += count(h, p, host, place);
    }
    group_in += item.out_count * size;
    two_.add(item);
  }
  two_.run_between_hosts();
  const std::byte* from = second_.room(0) + passed * size;  // [host][place]
  for (std::size_t h = 0; h < hosts_; ++h) {
    for (std::size_t p = 0; p < places_; ++p) {
      const std::size_t n = count(h, p, host, place);
      copy_bytes(items[rank_at(h, p)].out, from, n * size);
      from += n * size;
    }
  }
}

/// Refused on one host is refused on all.
void HierarchicalEngine::allocate(Operation& operation) {
  AllocateResult& result = *operation.allocate;
  const bool shared = operation.header.kind == OpKind::allocate_shared;
  if (shared && hosts_ > 1) {
    compare_between_hosts();
    result.refused =
        std::make_exception_ptr(Unsupported("allocate_shared: the ranks run on several hosts, which share no memory"));
    return;
  }
  Operation& part = two_.begin(operation.header.kind, DType::u8);
  part.header.count = operation.header.count;
  part.allocate = &result;
  two_.run_on_host();
  std::int32_t refused = result.refused ? 1 : 0;
  two_.begin(OpKind::all_reduce, DType::i32, DType::i32, ReduceOp::max);
  auto* const flag = reinterpret_cast<std::byte*>(&refused);
  two_.add({.in = flag, .out = flag, .count = 1});
  two_.run_between_hosts();
  if (result.buffer && refused == 0) {
    result.buffer = std::make_shared<HostBuffer>(std::move(result.buffer), two_.map(), two_.host());
  } else if (result.buffer) {
    result.buffer.reset();
    result.refused = std::make_exception_ptr(
        AllocationRefused(ENOMEM, text("allocating ", operation.header.count, " bytes was refused on another host")));
  }
}

}  // namespace

std::unique_ptr<Communicator> create_hierarchical(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<net::Mesh> host_mesh,
                                                  std::vector<int> host_of_rank, std::vector<LinkSockets> links,
                                                  HierarchicalOptions options) {
  if (!mesh || !host_mesh) throw InvalidArgument("create_hierarchical: no mesh");
  if (host_of_rank.size() != static_cast<std::size_t>(mesh->world_size()))
    throw InvalidArgument(text("hosts of ", host_of_rank.size(), " ranks; the mesh has ", mesh->world_size()));
  const HostMap map(host_of_rank);
  const auto rank = static_cast<std::size_t>(mesh->rank());
  if (host_mesh->world_size() != map.places() || host_mesh->rank() != map.place[rank])
    throw InvalidArgument(text("rank ", rank, " has place ", map.place[rank], " of ", map.places(),
                               " on its host, but rank ", host_mesh->rank(), " of ", host_mesh->world_size(),
                               " in the mesh of that host"));
  std::vector<bool> wanted;
  for (std::size_t r = 0; r < links.size() && r < map.place.size(); ++r)
    wanted.push_back(r != rank && map.place[r] == map.place[rank]);
  check_links(links, wanted, mesh->rank(), true);
  const auto shared = std::make_shared<std::vector<LinkSockets>>(std::move(links));  // a factory must be copyable
  return make_communicator(once(
      [mesh = std::move(mesh), host_mesh = std::move(host_mesh), map, shared, options](SymmetricMemory& symmetric) {
        return std::make_unique<HierarchicalEngine>(mesh, host_mesh, map, std::move(*shared), options, symmetric);
      }));
}

}  // namespace zcomm::coll
