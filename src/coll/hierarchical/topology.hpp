// Topology: the location of ranks, the engines of both levels, and running parts of an operation on them.
//
// Invariant: every operation is compared on the host and then, by its first part between hosts, everywhere, before
// data of another rank is used. Thread rule: the thread that runs the operation; close() from any; and
// all_reduce_between_hosts() from one other thread.
#pragma once

#include <memory>
#include <vector>

#include "coll/hierarchical/engine.hpp"
#include "coll/shm/engine.hpp"
#include "coll/tcp/group.hpp"

namespace zcomm::coll {

/// Ranks as (host, local rank).
struct HostMap {
  std::vector<int> host, local_rank;    ///< by rank
  std::vector<std::vector<int>> ranks;  ///< [host][local_rank]
  bool in_blocks = true;                ///< rank == host * local_world_size + local_rank

  /// Throws InvalidArgument unless all hosts have equally many ranks.
  explicit HostMap(const std::vector<int>& host_of_rank);
  int hosts() const { return static_cast<int>(ranks.size()); }
  int local_world_size() const { return static_cast<int>(ranks[0].size()); }
  int world_size() const { return static_cast<int>(host.size()); }
  int rank(std::size_t on_host, std::size_t its_local_rank) const { return ranks[on_host][its_local_rank]; }
};

class Topology {
 public:
  Topology(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<net::Mesh> host_mesh, HostMap map,
           std::vector<PeerSockets> links, const HierarchicalOptions& options, SymmetricMemory& symmetric);

  const HostMap& map() const { return map_; }
  int rank() const { return rank_; }
  int host() const { return map_.host[static_cast<std::size_t>(rank_)]; }
  int local_rank() const { return map_.local_rank[static_cast<std::size_t>(rank_)]; }

  /// Numbers the operation and compares it with the other operations of the host's ranks.
  void enter(Operation& operation);
  /// Turns the failure in flight into the failure that all ranks report, and throws it.
  [[noreturn]] void fail();

  // A part of the entered operation: begin, add each tensor (of one rank, as Item says), then run it on one level.
  Operation& begin(OpKind kind, DType dtype, DType out_dtype, ReduceOp op = ReduceOp::sum, int root = -1);
  Operation& begin(OpKind kind, DType dtype, int root = -1) { return begin(kind, dtype, dtype, ReduceOp::sum, root); }
  void add(const Item& item) { part_.items.add(item, spares_); }
  void run_on_host() { run_part(local_rank(), map_.local_world_size()), host_engine_.run(part_); }
  void run_between_hosts() { run_part(host(), map_.hosts()), group_.run(part_, &signature_); }
  /// A part that another thread may run, concurrently with parts on the host.
  void all_reduce_between_hosts(const Item& item, DType dtype, ReduceOp op);
  /// The operation's own buffers also count as symmetric memory in this part.
  void keep_buffers(bool in, bool out) { keep_in_ = in, keep_out_ = out; }

  ShmEngine& host_engine() { return host_engine_; }
  const ShmEngine& host_engine() const { return host_engine_; }
  TcpGroup& group() { return group_; }
  const TcpGroup& group() const { return group_; }
  void close() noexcept;
  double longest_s() const { return host_engine_.longest_s(); }

 private:
  /// "all_reduce ... (operation 3), among ranks 2, 3 of one host, there counted from 0: "
  std::string context() const;
  void start(Operation& part, OpKind kind, DType dtype, DType out_dtype, ReduceOp op, int root) const;
  void run_part(int own, int ranks);
  std::vector<int> group_members() const;

  std::shared_ptr<net::Mesh> mesh_;
  const HostMap map_;
  const int rank_;
  ShmEngine host_engine_;
  TcpGroup group_;
  Signature signature_{};  // of the entered operation
  std::uint32_t sequence_ = 0;
  std::vector<Signature> gathered_;
  Operation part_{}, between_{};
  SpareItems spares_;
  bool keep_in_ = false, keep_out_ = false;
};

}  // namespace zcomm::coll
