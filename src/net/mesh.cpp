// Mesh: handshake (or adopted sockets), then a Monitor on the control sockets and an Exchange on the data sockets.
//
// Invariant: the descriptors stay open until no thread can be polling them (leaving shuts sockets down, then waits). A
// forked child (a data loader's worker) holds copies of all descriptors but may not act for its parent: every call but
// the destructor throws there, and sends nothing. Source: [Note: handshake], [Note: liveness].
#include "net/mesh.hpp"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "base/error.hpp"
#include "net/exchange.hpp"
#include "net/handshake.hpp"
#include "net/monitor.hpp"
#include "net/socket.hpp"
#include "net/tcp.hpp"

namespace zcomm::net {

namespace {

enum class Reach { host, hosts };

class SocketMesh final : public Mesh {
 public:
  SocketMesh(int rank, std::vector<Channel> channels, Reach reach)
      : rank_(rank),
        world_size_(static_cast<int>(channels.size())),
        reach_(reach),
        monitor_(take_watched(channels)),
        exchange_(rank, take_data(channels)) {}

  ~SocketMesh() override {
    leave();
    if (forked()) monitor_.abandon();
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  std::vector<Parcel> exchange(Parcel mine, double timeout_s) override {
    check_owner();
    if (mine.fd && reach_ == Reach::hosts)
      throw Unsupported(text("rank ", rank_, " exchanges a descriptor, which cannot travel between hosts"));
    const std::lock_guard lock(exchange_mutex_);
    check_member();
    const Exchanging exchanging(*this);
    try {
      return exchange_.run(std::move(mine), timeout_s, monitor_);
    } catch (const PeerLost&) {
      check_member();  // our own leave() on another thread looks like the end of a peer
      throw;
    }
  }

  std::optional<Loss> lost() const override { return monitor_.lost(); }
  Fate fate(int rank) const override { return monitor_.fate(rank); }
  std::optional<ProcessState> process(int rank) const override { return monitor_.process(rank); }
  int on_loss(std::function<void(Loss)> callback) override { return monitor_.on_loss(std::move(callback)); }
  void forget(int id) override { monitor_.forget(id); }

  void leave() noexcept override { end(true); }
  void drop_dead() noexcept override { end(false); }

 private:
  /// Marks that exchange() runs on this thread. At its end it closes the sockets for a leave() that a signal handler
  /// made within it and that could not close them. A leave() on another thread may still use the sockets, and closes
  /// them itself.
  struct Exchanging {
    explicit Exchanging(SocketMesh& of) : self(of) { self.exchanging_ = std::this_thread::get_id(); }
    ~Exchanging() {
      self.exchanging_ = std::thread::id();
      if (self.left_within_) self.exchange_.close();
    }
    SocketMesh& self;
  };

  static std::vector<Monitor::Watched> take_watched(std::vector<Channel>& channels) {
    std::vector<Monitor::Watched> watched;
    for (Channel& channel : channels) watched.push_back({std::move(channel.control), std::move(channel.process)});
    return watched;
  }
  static std::vector<UniqueFd> take_data(std::vector<Channel>& channels) {
    std::vector<UniqueFd> sockets;
    for (Channel& channel : channels) sockets.push_back(std::move(channel.data));
    return sockets;
  }

  bool forked() const { return ::getpid() != owner_; }

  void check_owner() const {
    if (forked())
      throw Error(text("the mesh of rank ", rank_, " belongs to process ", owner_, ", not to its forked child"));
  }
  void check_member() const {
    if (ended_) throw Error(text("rank ", rank_, " has left the mesh"));
  }

  void end(bool goodbye) noexcept {
    if (forked() || ended_.exchange(true)) return;
    if (goodbye) monitor_.say_goodbye();
    exchange_.abort();
    monitor_.stop();
    if (exchanging_ == std::this_thread::get_id()) {
      left_within_ = true;
      return;
    }
    const std::lock_guard lock(exchange_mutex_);
    exchange_.close();
  }

  const int rank_;
  const int world_size_;
  const Reach reach_;
  const pid_t owner_ = ::getpid();
  std::atomic<bool> ended_{false};
  Monitor monitor_;
  std::mutex exchange_mutex_;
  std::atomic<std::thread::id> exchanging_{};
  bool left_within_ = false;  // only of the exchanging thread
  Exchange exchange_;
};

}  // namespace

std::shared_ptr<Mesh> Mesh::connect(int rank, int world_size, Listener listener, std::span<const std::string> addresses,
                                    std::string_view token, double timeout_s) {
  if (world_size < 1 || addresses.size() != static_cast<std::size_t>(world_size)) {
    throw InvalidArgument(text("world_size ", world_size, " with ", addresses.size(), " addresses"));
  }
  if (rank < 0 || rank >= world_size) throw InvalidArgument(text("rank ", rank, " is not in [0, ", world_size, ")"));
  if (token.size() > kMaxTokenNbytes) {
    throw InvalidArgument(text("a token of ", token.size(), " bytes; at most ", kMaxTokenNbytes));
  }
  if (addresses[static_cast<std::size_t>(rank)] != listener.address()) {
    throw InvalidArgument(text("the listener's address ", listener.address(), " is not the one given for rank ", rank,
                               ", ", addresses[static_cast<std::size_t>(rank)]));
  }
  return std::make_shared<SocketMesh>(rank, connect_all(rank, listener, addresses, token, timeout_s), Reach::host);
}

std::shared_ptr<Mesh> Mesh::adopt(int rank, std::vector<AdoptedSockets> sockets) {
  const int world_size = static_cast<int>(sockets.size());
  if (rank < 0 || rank >= world_size) throw InvalidArgument(text("rank ", rank, " is not in [0, ", world_size, ")"));
  std::vector<Channel> channels(sockets.size());
  for (int peer = 0; peer < world_size; ++peer) {
    AdoptedSockets& given = sockets[static_cast<std::size_t>(peer)];
    const bool wanted = peer != rank;
    if (static_cast<bool>(given.data) != wanted || static_cast<bool>(given.control) != wanted)
      throw InvalidArgument(text("rank ", rank, " was given ", wanted ? "not both" : "some", " of the sockets to rank ",
                                 peer, wanted ? "" : ", which is itself"));
    if (!wanted) continue;
    make_prompt(given.data.get(), peer);
    make_prompt(given.control.get(), peer);
    notice_dead_host(given.control.get(), peer);
    Channel& channel = channels[static_cast<std::size_t>(peer)];
    channel.data = std::move(given.data);
    channel.control = std::move(given.control);
  }
  return std::make_shared<SocketMesh>(rank, std::move(channels), Reach::hosts);
}

}  // namespace zcomm::net
