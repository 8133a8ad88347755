// TcpGroup: all parts of TcpEngine, for some ranks of a mesh (all, or one of each host).
//
// Thread rule: run() and agree() by one thread at a time; the rest free-threaded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "coll/engine.hpp"
#include "coll/tcp/arrival.hpp"
#include "coll/tcp/direct.hpp"
#include "coll/tcp/halving.hpp"
#include "coll/tcp/messenger.hpp"
#include "coll/tcp/ring.hpp"
#include "coll/tcp/small.hpp"
#include "coll/tcp/sockets.hpp"

namespace zcomm::coll {

enum class TcpAlgorithm {
  small,   ///< in the entry's own messages
  direct,  ///< directly to the rank that needs it; all_reduce: recursive halving and doubling, unless in rank order
  ring     ///< all sockets of the neighbours, segment by segment
};

class TcpGroup {
 public:
  /// members: ranks of the mesh, in the order of the group. links: by rank of the mesh; two or more to members, none or
  /// one (for messages and failures) to others. Collective over the group.
  TcpGroup(std::shared_ptr<net::Mesh> mesh, std::vector<int> members, std::vector<PeerSockets> links,
           TcpOptions options);
  ~TcpGroup() { close(); }

  int rank() const { return sockets_.rank(); }
  int world_size() const { return sockets_.world_size(); }

  /// Compares and carries out. `stands_for`: compare and report this signature instead of the operation's own.
  void run(Operation& operation, const Signature* stands_for = nullptr);
  /// Sends the failure of this rank to all peers; no effect if a failure is already set.
  void fail(net::Cause cause, int rank, std::string message) noexcept;
  TcpFailure& failure() { return failure_; }
  TcpArrival& guard() { return arrival_; }
  TcpSockets& sockets() { return sockets_; }
  TcpControl& control() { return control_; }
  Messenger& messenger() { return messenger_; }
  void close() noexcept;
  void suspend_deadline(bool suspended) { control_.suspend_deadline(suspended); }
  std::size_t nbytes() const;

 private:
  /// Prepares all of them.
  static std::vector<UniqueFd> take_message_sockets(std::vector<PeerSockets>& links);
  static std::vector<PeerSockets> pick(std::vector<PeerSockets>& links, const std::vector<int>& members);
  void agree_on_options(const TcpOptions& options);
  TcpAlgorithm choose(const Operation& operation) const;
  void work(const Operation& operation, TcpAlgorithm algorithm);
  void all_reduce(const Operation& operation, TcpAlgorithm algorithm);
  void reduce(const Operation& operation, TcpAlgorithm algorithm);
  void reduce_scatter(const Operation& operation, TcpAlgorithm algorithm, std::byte* result);
  void all_gather(const Operation& operation, TcpAlgorithm algorithm);
  void broadcast(const Operation& operation, TcpAlgorithm algorithm);
  void all_to_all(const Operation& operation);
  void ring(const Operation& operation, bool reduces, bool gathers, std::byte* result);

  TcpFailure failure_;
  TcpControl control_;
  TcpSockets sockets_;
  TcpMessenger messenger_;
  TcpArrival arrival_;
  TcpSmall small_;
  TcpDirect direct_;
  TcpHalving halving_;
  std::unique_ptr<TcpRing> ring_;
  TcpChunks chunks_;
  std::vector<std::byte> chunk_;  // of reduce, on ranks other than the root
  std::string forced_;            // ZCOMM_LINK_ALGO
  std::uint32_t sequence_ = 0;
};

}  // namespace zcomm::coll
