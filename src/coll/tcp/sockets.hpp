// TcpSockets: the sockets of the collectives, and waiting on them for as long as that can succeed.
//
// A group of ranks (all of a mesh, or some: then `name` is the rank in the mesh, used in errors). Bytes move only when
// an algorithm asks for it, on the thread that runs the operation; no other reads or writes these sockets. Invariant:
// received bytes count before any failure: an operation succeeds if the peers did their part, even if they have ended
// since. Thread rule: the thread that runs the operation; close() from any.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "coll/late_clock.hpp"
#include "coll/tcp/control.hpp"
#include "coll/tcp/engine.hpp"

namespace zcomm::coll {

/// Bytes for one peer, or from it.
struct TcpTransfer {
  int peer;
  bool out;
  std::vector<iovec> pieces{};
  std::size_t first = 0;  ///< pieces before this one have moved

  bool done() const { return first == pieces.size(); }
  void clear() { pieces.clear(), first = 0; }
  void add(const void* data, std::size_t nbytes) {
    if (nbytes > 0) pieces.push_back({const_cast<void*>(data), nbytes});
  }
};

class TcpSockets {
 public:
  /// members: the group's ranks in the mesh; links: by rank of the group, without the sockets that `post` has.
  TcpSockets(std::shared_ptr<net::Mesh> mesh, std::vector<int> members, std::vector<PeerSockets> links,
             TcpControl& post, const WaitTimes& times);
  ~TcpSockets();
  TcpSockets(const TcpSockets&) = delete;
  TcpSockets& operator=(const TcpSockets&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(sockets_.size()); }
  std::span<const int> members() const { return members_; }
  int name(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  /// Sockets to `peer` that the ring may use.
  int socket_count(int peer) const { return static_cast<int>(sockets_[static_cast<std::size_t>(peer)].size()); }
  int socket(int peer, int index) const {
    return sockets_[static_cast<std::size_t>(peer)][static_cast<std::size_t>(index)].get();
  }

  /// Starts the clock of an operation; throws the failure if there has been one.
  void begin(const Signature& signature);
  /// All ranks have entered it: a late one is late within it.
  void entered() {
    if (!warned_of_.empty()) log_arrival();
    entering_ = false;
  }

  /// Moves all of them concurrently; at most one per peer and direction.
  void move(std::span<TcpTransfer> transfers);

  // For loops of their own: try, and when nothing moved, wait.
  /// Moves as much of `transfer` as possible now; returns whether anything moved. PeerLost at the end of the stream.
  bool advance(TcpTransfer& transfer, int index);
  /// The next wait() also wakes for these events.
  void expect(int peer, int index, short events);
  /// Waits until one of them is ready; throws PeerLost, Timeout, CollectiveMismatch, Error, Interrupted.
  void wait();

  /// Makes this and later waits end, and sends the report to all peers.
  void fail(FailureReport report) noexcept { control_.fail(std::move(report)); }
  void close() noexcept;
  bool is_closing() const { return closing_; }
  [[noreturn]] void throw_lost(int peer);
  std::string during() const;
  TcpControl& control() { return control_; }

 private:
  /// The answers of the late ranks, by their numbers in the mesh.
  struct Late {
    std::vector<int> ranks;
    std::string details;
    bool show_life = true;
    bool is_first = true;  // this rank is the first of the waiting ranks in the operation
  };
  void restart_clock() { clock_.start(Clock::now()); }
  void look_around();
  void look_at_late();
  Late ask_late(bool with_hosts, double patience_s);
  std::string complaint(const Late& late, const char* waited) const;
  void log_arrival();
  bool has_left(int name) const;

  std::shared_ptr<net::Mesh> mesh_;
  const std::vector<int> members_;
  const int rank_;
  std::vector<PeerSockets> sockets_;
  TcpControl& control_;
  Signature current_{};
  bool busy_ = false, entering_ = false;
  LateClock clock_;
  std::string warned_of_;      // the ranks, until the operation has progressed
  std::vector<pollfd> fds_;    // fds_[0] is the failure's event
  std::vector<int> expected_;  // the peer of each further one
  std::atomic<bool> closing_{false};
  UniqueFd close_event_ = net::make_event();
  int callback_ = -1;
};

}  // namespace zcomm::coll
