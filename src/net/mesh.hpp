// Mesh: ranks with a socket between each two, and their fates (decisions D1, D5).
//
// On one host connect() makes unix sockets. Between hosts adopt() takes sockets that the caller has connected. Each
// rank listens on a socket with a random abstract name (nothing in the file system, nothing left after SIGKILL). A
// connection counts only after SO_PEERCRED shows the same user and the peer has proved the job's token. A monitor
// thread watches all sockets: end of file without a goodbye means that the peer died. Thread rule: exchange() is
// serialised and must be called in the same order on every rank; the rest is free-threaded.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.hpp"
#include "net/fate.hpp"

namespace zcomm::net {

/// One rank's message to all others: bytes and, optionally, an open descriptor (SCM_RIGHTS).
struct Parcel {
  std::vector<std::byte> bytes;
  UniqueFd fd;
};

/// A process of this host, as the kernel shows it.
struct ProcessState {
  int pid;
  bool is_stopped;  ///< by SIGSTOP, a terminal or a debugger
};

/// The listening half of a rank, made before the job's rendezvous exchanges addresses.
class Listener {
 public:
  Listener();
  Listener(Listener&&) noexcept;
  Listener& operator=(Listener&&) noexcept;
  ~Listener();
  /// Text that another rank passes to Mesh::connect.
  const std::string& address() const { return address_; }
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::string address_;
};

/// The connected sockets to one other rank; both empty for the rank itself.
struct AdoptedSockets {
  UniqueFd data;     ///< parcels of exchange()
  UniqueFd control;  ///< goodbyes; its end means that the peer ended
};

class Mesh {
 public:
  /// Connects all ranks. addresses[r] is rank r's Listener::address(); `token` is the job's shared secret.
  /// Throws Timeout naming the missing ranks, PeerLost if one ended meanwhile, InvalidArgument for a bad rank,
  /// world_size, token (over 256 bytes) or address.
  static std::shared_ptr<Mesh> connect(int rank, int world_size, Listener listener,
                                       std::span<const std::string> addresses, std::string_view token,
                                       double timeout_s);
  /// The same over connected and authenticated stream sockets (usually TCP), by rank. They cannot carry descriptors:
  /// exchange() refuses one with Unsupported. A dead process is noticed at once, a dead host by keepalive (kHostDeath_s
  /// in tcp.hpp). Throws InvalidArgument for a bad rank or for sockets that are not one pair per peer.
  static std::shared_ptr<Mesh> adopt(int rank, std::vector<AdoptedSockets> sockets);
  virtual ~Mesh() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// Returns the parcels of all ranks (own included, fd duplicated). Collective. Throws PeerLost, Timeout (naming the
  /// missing ranks), CollectiveMismatch; after a failure every later call throws.
  virtual std::vector<Parcel> exchange(Parcel mine, double timeout_s) = 0;

  /// The first peer that was found lost, if any. Cheap: one atomic load while no peer is lost.
  virtual std::optional<Loss> lost() const = 0;
  /// The fate of `rank`, as far as it is known; alive for numbers that are no ranks.
  virtual Fate fate(int rank) const = 0;
  /// Calls `callback` on the monitor thread at each later loss (ask lost() for earlier ones after registering); it must
  /// not throw. Returns an id for forget(); after forget() returns it is not running (unless it called forget itself).
  virtual int on_loss(std::function<void(Loss)> callback) = 0;
  virtual void forget(int id) = 0;

  /// Says goodbye to all peers and closes the sockets. Not collective; idempotent; the destructor does it too.
  virtual void leave() noexcept = 0;
  /// Tests only: closes the sockets with no goodbye, as SIGKILL would.
  virtual void drop_dead() noexcept = 0;

  /// The process of `rank`; none for this rank, for ranks of other hosts, and if the kernel does not show it.
  virtual std::optional<ProcessState> process(int /*rank*/) const { return std::nullopt; }
};

}  // namespace zcomm::net
