// The operations of [Note: two levels] (engine.hpp), for the files that implement them.
#pragma once

#include <cstring>
#include <span>
#include <vector>

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
                     std::vector<LinkSockets> links, const HierarchicalOptions& options, SymmetricMemory& symmetric)
      : two_(std::move(mesh), std::move(host_mesh), std::move(map), std::move(links), options, symmetric),
        hosts_(static_cast<std::size_t>(two_.map().hosts())),
        places_(static_cast<std::size_t>(two_.map().places())) {}

  int rank() const override { return two_.rank(); }
  int world_size() const override { return two_.map().world_size(); }
  Messenger& messenger() override { return two_.group().messenger(); }
  void close() noexcept override { two_.close(); }
  double timeout_s() const override { return two_.timeout_s(); }
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
    two_.begin(OpKind::barrier, DType::uint8);
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

inline std::size_t total_of(std::span<const Item> items) {
  std::size_t total = 0;
  for (const Item& item : items) total += item.count;
  return total;
}

}  // namespace zcomm::coll
