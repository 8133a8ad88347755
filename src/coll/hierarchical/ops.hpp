// The operations of [Note: two levels] (engine.hpp), for the files that implement them.
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "coll/encoded.hpp"
#include "coll/hierarchical/topology.hpp"

namespace zcomm::coll {

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

inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t nbytes) {
  if (nbytes > 0 && to != from) std::memmove(to, from, nbytes);
}

class HierarchicalEngine final : public Engine {
 public:
  HierarchicalEngine(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<net::Mesh> host_mesh, HostMap map,
                     std::vector<PeerSockets> links, const HierarchicalOptions& options, SymmetricMemory& symmetric)
      : topology_(std::move(mesh), std::move(host_mesh), std::move(map), std::move(links), options, symmetric),
        hosts_(static_cast<std::size_t>(topology_.map().hosts())),
        local_world_size_(static_cast<std::size_t>(topology_.map().local_world_size())) {}

  int rank() const override { return topology_.rank(); }
  int world_size() const override { return topology_.map().world_size(); }
  Messenger& messenger() override { return topology_.group().messenger(); }
  void fail(const std::string& why) noexcept override { topology_.group().fail(net::Cause::failed, rank(), why); }
  void close() noexcept override { topology_.close(); }
  double longest_s() const override { return topology_.longest_s(); }
  void suspend_deadline(bool suspended) override {
    topology_.host_engine().suspend_deadline(suspended);
    topology_.group().suspend_deadline(suspended);
  }
  int coded_parts() const override { return static_cast<int>(hosts_); }
  bool runs_coded(OpKind kind) const override { return kind == OpKind::reduce_scatter; }
  std::size_t nbytes() const override {
    return encoded_.nbytes() + topology_.host_engine().nbytes() + topology_.group().nbytes() + first_.nbytes() +
           second_.nbytes() + tails_.nbytes();
  }

  void run(Operation& operation) override {
    try {
      topology_.enter(operation);
      work(operation);
    } catch (...) {
      topology_.fail();
    }
  }

 private:
  void work(Operation& operation);
  void all_reduce(const Signature& signature, std::span<const Item> items);
  void reduce(const Signature& signature, std::span<const Item> items);
  void reduce_scatter(const Operation& operation, std::span<const Item> items);
  void add_encoded(const Operation& operation, std::byte* sums);
  void all_gather(const Signature& signature, std::span<const Item> items);
  void broadcast(const Signature& signature);
  void gather(const Signature& signature, std::span<const Item> items);
  void scatter(const Signature& signature, std::span<const Item> items);
  void all_to_all(const Signature& signature, std::span<const Item> items);
  void allocate(Operation& operation);
  void compare_between_hosts() {
    topology_.begin(OpKind::barrier, DType::uint8);
    topology_.run_between_hosts();
  }
  int host_of(int rank) const { return topology_.map().host[static_cast<std::size_t>(rank)]; }
  int local_rank_of(int rank) const { return topology_.map().local_rank[static_cast<std::size_t>(rank)]; }
  std::size_t rank_at(std::size_t host, std::size_t local_rank) const {
    return static_cast<std::size_t>(topology_.map().rank(host, local_rank));
  }

  Topology topology_;
  const std::size_t hosts_, local_world_size_;
  Scratch first_, second_, tails_;
  EncodedParts encoded_;
  std::vector<EncodedTensor> encoded_tensors_;
  std::uint64_t encoded_calls_ = 0;
  std::span<const Item> items_;
};

inline std::size_t total_of(std::span<const Item> items) {
  std::size_t total = 0;
  for (const Item& item : items) total += item.count;
  return total;
}

}  // namespace zcomm::coll
