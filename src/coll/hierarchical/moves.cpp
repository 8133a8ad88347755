// gather, scatter and all_to_all of [Note: two levels] (engine.hpp).
#include <vector>

#include "base/error.hpp"
#include "coll/hierarchical/ops.hpp"

namespace zcomm::coll {

void HierarchicalEngine::gather(const Signature& signature, std::span<const Item> items) {
  const std::size_t size = size_of(signature.dtype), total = total_of(items), row = total * hosts_;
  const bool at_root = topology_.host() == host_of(signature.root);
  std::byte* const group = first_.room(row * size);  // [item][host], on the root's host
  topology_.begin(OpKind::gather, signature.dtype, host_of(signature.root));
  std::size_t at = 0;
  for (const Item& item : items) {
    topology_.add({.in = item.in, .out = at_root ? group + at * hosts_ * size : nullptr, .count = item.count});
    at += item.count;
  }
  topology_.run_between_hosts();
  if (!at_root) return;
  std::byte* const all = second_.room(row * local_world_size_ * size);  // [local_rank][item][host]
  topology_.begin(OpKind::all_gather, signature.dtype);
  topology_.add({.in = group, .out = all, .count = row});
  topology_.run_on_host();
  at = 0;
  for (const Item& item : items) {
    for (std::size_t h = 0; h < hosts_ && signature.root == rank(); ++h)
      for (std::size_t p = 0; p < local_world_size_; ++p)
        copy_bytes(item.out + rank_at(h, p) * item.count * size, all + (p * row + at * hosts_ + h * item.count) * size,
                   item.count * size);
    at += item.count;
  }
}

void HierarchicalEngine::scatter(const Signature& signature, std::span<const Item> items) {
  const std::size_t size = size_of(signature.dtype), total = total_of(items), row = total * hosts_;
  const bool at_root = topology_.host() == host_of(signature.root);
  std::byte* const all = second_.room(at_root ? row * local_world_size_ * size : 0);  // [local_rank][item][host]
  std::size_t at = 0;
  if (signature.root == rank()) {
    for (const Item& item : items) {
      for (std::size_t h = 0; h < hosts_; ++h)
        for (std::size_t p = 0; p < local_world_size_; ++p)
          copy_bytes(all + (p * row + at * hosts_ + h * item.count) * size, item.in + rank_at(h, p) * item.count * size,
                     item.count * size);
      at += item.count;
    }
  }
  if (at_root) {
    topology_.begin(OpKind::broadcast, signature.dtype, local_rank_of(signature.root));
    topology_.add({.in = all, .out = all, .count = row * local_world_size_});
    topology_.run_on_host();
  }
  const std::byte* const mine = all + (at_root ? static_cast<std::size_t>(topology_.local_rank()) * row * size : 0);
  topology_.begin(OpKind::scatter, signature.dtype, host_of(signature.root));
  at = 0;
  for (const Item& item : items) {
    topology_.add({.in = at_root ? mine + at * hosts_ * size : nullptr, .out = item.out, .count = item.count});
    at += item.count;
  }
  topology_.run_between_hosts();
}

/// Every rank gathers all counts first, so that all find the same mismatch and know which data passes through which
/// rank.
void HierarchicalEngine::all_to_all(const Signature& signature, std::span<const Item> items) {
  const std::size_t world = hosts_ * local_world_size_, row = 2 * world;
  const auto host = static_cast<std::size_t>(topology_.host()),
             local_rank = static_cast<std::size_t>(topology_.local_rank());
  std::vector<std::uint64_t> mine(row), beside(row * local_world_size_), all(row * world);  // all: [host][local_rank]
  for (std::size_t q = 0; q < world; ++q) mine[q] = items[q].count, mine[world + q] = items[q].out_count;
  const auto bytes = [](std::vector<std::uint64_t>& from) { return reinterpret_cast<std::byte*>(from.data()); };
  topology_.begin(OpKind::all_gather, DType::int64);
  topology_.add({.in = bytes(mine), .out = bytes(beside), .count = row});
  topology_.run_on_host();
  topology_.begin(OpKind::all_gather, DType::int64);
  topology_.add({.in = bytes(beside), .out = bytes(all), .count = row * local_world_size_});
  topology_.run_between_hosts();
  const auto row_of = [&](std::size_t h, std::size_t p) { return all.data() + (h * local_world_size_ + p) * row; };
  const auto row_of_rank = [&](std::size_t r) {
    return row_of(static_cast<std::size_t>(host_of(static_cast<int>(r))),
                  static_cast<std::size_t>(local_rank_of(static_cast<int>(r))));
  };
  for (std::size_t from = 0; from < world; ++from)
    for (std::size_t to = 0; to < world; ++to)
      if (row_of_rank(from)[to] != row_of_rank(to)[world + from])
        throw CollectiveMismatch(text(describe(signature), ": rank ", from, " sends ", row_of_rank(from)[to],
                                      " elements to rank ", to, ", which expects ", row_of_rank(to)[world + from]));

  // On the host: sends to each local rank the parts for that local rank of any host. Then between hosts, from all local
  // ranks together.
  const std::size_t size = size_of(signature.dtype);
  const auto count = [&](std::size_t h, std::size_t p, std::size_t to_h, std::size_t to_p) {
    return static_cast<std::size_t>(row_of(h, p)[rank_at(to_h, to_p)]);
  };
  std::size_t sent = 0, passed = 0, came = 0;
  for (std::size_t h = 0; h < hosts_; ++h)
    for (std::size_t p = 0; p < local_world_size_; ++p)
      sent += count(host, local_rank, h, p), passed += count(host, p, h, local_rank),
          came += count(h, p, host, local_rank);
  std::byte* out = first_.room((sent + passed) * size);
  std::byte* in = out + sent * size;
  topology_.begin(OpKind::all_to_all, signature.dtype);
  for (std::size_t p = 0; p < local_world_size_; ++p) {
    Item item{.in = out, .out = in};
    for (std::size_t h = 0; h < hosts_; ++h) {
      const std::size_t n = count(host, local_rank, h, p);
      copy_bytes(out, items[rank_at(h, p)].in, n * size);
      out += n * size;
      item.count += n;
      item.out_count += count(host, p, h, local_rank);
    }
    in += item.out_count * size;
    topology_.add(item);
  }
  topology_.run_on_host();

  std::byte* group_out = second_.room((passed + came) * size);
  std::byte* group_in = group_out + passed * size;
  topology_.begin(OpKind::all_to_all, signature.dtype);
  for (std::size_t h = 0; h < hosts_; ++h) {
    Item item{.in = group_out, .out = group_in};
    const std::byte* from = first_.room(0) + sent * size;  // [local_rank][host]
    for (std::size_t p = 0; p < local_world_size_; ++p) {
      for (std::size_t to = 0; to < hosts_; ++to) {
        const std::size_t n = count(host, p, to, local_rank);
        if (to == h) {
          copy_bytes(group_out, from, n * size);
          group_out += n * size;
          item.count += n;
        }
        from += n * size;
      }
      item.out_count += count(h, p, host, local_rank);
    }
    group_in += item.out_count * size;
    topology_.add(item);
  }
  topology_.run_between_hosts();
  const std::byte* from = second_.room(0) + passed * size;  // [host][local_rank]
  for (std::size_t h = 0; h < hosts_; ++h) {
    for (std::size_t p = 0; p < local_world_size_; ++p) {
      const std::size_t n = count(h, p, host, local_rank);
      copy_bytes(items[rank_at(h, p)].out, from, n * size);
      from += n * size;
    }
  }
}

}  // namespace zcomm::coll
