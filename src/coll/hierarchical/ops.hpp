// The operations of [Note: two levels] (engine.hpp), for the files that implement them.
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "coll/encoded.hpp"
#include "coll/hierarchical/second_thread.hpp"
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

/// Some of an all_reduce's elements, and their memory ([Note: pieces of an all_reduce]).
struct ReducePiece {
  std::vector<Item> items;
  Scratch sums, tails;                             ///< of this rank's parts; of elements that do not divide
  std::size_t parts = 0, rest = 0, rest_part = 0;  ///< elements
};

class HierarchicalEngine final : public Engine {
 public:
  HierarchicalEngine(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<net::Mesh> host_mesh, HostMap map,
                     std::vector<PeerSockets> links, const HierarchicalOptions& options, SymmetricMemory& symmetric)
      : topology_(std::move(mesh), std::move(host_mesh), std::move(map), std::move(links), options, symmetric),
        hosts_(static_cast<std::size_t>(topology_.map().hosts())),
        local_world_size_(static_cast<std::size_t>(topology_.map().local_world_size())),
        piece_nbytes_(options.piece_nbytes) {}

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
    std::size_t nbytes = encoded_.nbytes() + topology_.host_engine().nbytes() + topology_.group().nbytes() +
                         first_.nbytes() + second_.nbytes();
    for (const ReducePiece& piece : pieces_) nbytes += piece.sums.nbytes() + piece.tails.nbytes();
    return nbytes;
  }

  void run(Operation& operation) override {
    try {
      topology_.enter(operation);
      work(operation);
    } catch (...) {
      end_with_failure();
    }
  }

 private:
  /// Throws the failure that all ranks report, when nothing of the operation runs any more.
  [[noreturn]] void end_with_failure() {
    struct Drain {
      SecondThread& thread;
      ~Drain() { thread.drain(); }
    } const drain{links_thread_};
    if (const auto first = links_thread_.error()) {  // this thread's error is its consequence
      try {
        std::rethrow_exception(first);
      } catch (...) {
        topology_.fail();
      }
    }
    topology_.fail();
  }

  void work(Operation& operation);
  void all_reduce(const Signature& signature, std::span<const Item> items);
  void cut(std::span<const Item> items, std::size_t size, std::size_t count);
  void sum_on_host(const Signature& signature, ReducePiece& piece);
  void sum_between_hosts(const Signature& signature, ReducePiece& piece);
  void spread_on_host(const Signature& signature, ReducePiece& piece);
  template <class Visit>
  void each_tail(ReducePiece& piece, std::size_t size, const Visit& visit);
  template <class Visit>
  void each_part(ReducePiece& piece, std::size_t wide_size, const Visit& visit);
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
  const std::size_t piece_nbytes_;
  Scratch first_, second_;
  EncodedParts encoded_;
  std::vector<EncodedTensor> encoded_tensors_;
  std::uint64_t encoded_calls_ = 0;
  std::span<const Item> items_;
  std::vector<ReducePiece> pieces_;
  std::size_t used_ = 0;                  // pieces of the operation
  const Signature* pieces_of_ = nullptr;  // the operation's
  SecondThread links_thread_{[this](std::size_t k) { sum_between_hosts(*pieces_of_, pieces_[k]); },
                             [this] { topology_.host_engine().close(); }};
};

inline std::size_t total_of(std::span<const Item> items) {
  std::size_t total = 0;
  for (const Item& item : items) total += item.count;
  return total;
}

}  // namespace zcomm::coll
