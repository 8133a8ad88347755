// See arrival.hpp.
#include "coll/tcp/arrival.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

struct EntryFrame {
  static constexpr std::uint32_t kMagic = 0x7a636531;  // "zce1"
  std::uint32_t magic = kMagic;
  std::uint32_t distance = 0;
  std::uint64_t identity = 0;
  std::uint64_t nbytes = 0;  ///< of cargo behind it
  std::uint64_t differs = 0;
};

}  // namespace

TcpArrival::TcpArrival(TcpSockets& sockets) : sockets_(sockets) {
  on_mismatch = [this](std::span<const Signature> signatures) {
    require_same(
        sockets_.world_size(), [&](int r) -> const Signature& { return signatures[static_cast<std::size_t>(r)]; },
        sockets_.members());
  };
}

void TcpArrival::reserve(std::size_t nbytes_of_all) {
  if (cargo_.size() < nbytes_of_all) cargo_.resize(nbytes_of_all);
}

std::byte* TcpArrival::block(int rank, std::size_t nbytes) {
  const int world = sockets_.world_size();
  return cargo_.data() + static_cast<std::size_t>((sockets_.rank() - rank + world) % world) * nbytes;
}

void TcpArrival::enter(const Signature& signature) { run(signature, Mode::none, 0, -1); }

void TcpArrival::enter_gathering(const Signature& signature, std::size_t nbytes) {
  run(signature, Mode::gather, nbytes, -1);
}

void TcpArrival::enter_broadcasting(const Signature& signature, std::size_t nbytes, int root) {
  run(signature, Mode::broadcast, nbytes, root);
}

void TcpArrival::run(const Signature& signature, Mode mode, std::size_t nbytes, int root) {
  const int world = sockets_.world_size(), rank = sockets_.rank();
  const std::uint64_t identity = mix(identity_of(signature), shown_ != nullptr ? identity_of(*shown_) : 0);
  bool differs = false;
  for (int distance = 1; distance < world; distance *= 2) {
    std::span<const std::byte> out;
    std::span<std::byte> in;
    if (mode == Mode::gather) {  // slots [0, distance) are filled
      const auto slots = static_cast<std::size_t>(std::min(distance, world - distance));
      out = {cargo_.data(), slots * nbytes};
      in = {cargo_.data() + static_cast<std::size_t>(distance) * nbytes, slots * nbytes};
    } else if (mode == Mode::broadcast) {  // ranks up to `distance` after the root have it
      const int mine = (rank - root + world) % world;
      const int theirs = (rank - distance - root + 2 * world) % world;
      const bool needed = (rank + distance - root + world) % world >= distance;
      if (mine < distance && needed) out = {block(root, nbytes), nbytes};
      if (theirs < distance && mine >= distance) in = {block(root, nbytes), nbytes};
    }
    differs = round(distance, identity, differs, out, in);
  }
  if (differs) compare_whole(shown_ != nullptr ? *shown_ : signature);
  sockets_.entered();
}

/// Returns whether a difference is known by now.
bool TcpArrival::round(int distance, std::uint64_t identity, bool differs, std::span<const std::byte> out,
                       std::span<std::byte> in) {
  const int world = sockets_.world_size();
  const EntryFrame mine{EntryFrame::kMagic, static_cast<std::uint32_t>(distance), identity, out.size(), differs};
  EntryFrame theirs;
  send_.clear(), recv_.clear();
  send_.peer = (sockets_.rank() + distance) % world;
  recv_.peer = (sockets_.rank() - distance + world) % world;
  send_.add(&mine, sizeof mine);
  send_.add(out.data(), out.size());
  recv_.add(&theirs, sizeof theirs);
  TcpTransfer both[] = {std::move(send_), std::move(recv_)};
  // Reads only the head first, because it holds the length of the rest; sending continues meanwhile.
  while (!both[1].done()) {
    const bool received = sockets_.advance(both[1], 0);
    const bool sent = !both[0].done() && sockets_.advance(both[0], 0);
    if (received || sent || both[1].done()) continue;
    sockets_.expect(both[1].peer, 0, POLLIN);
    if (!both[0].done()) sockets_.expect(both[0].peer, 0, POLLOUT);
    sockets_.wait();
  }
  if (theirs.magic != EntryFrame::kMagic || theirs.distance != mine.distance || theirs.nbytes > kMaxCargoNbytes) {
    const std::string message = text("the frame from rank ", sockets_.name(both[1].peer),
                                     " is not the beginning of an operation: the streams are out of step");
    sockets_.fail({net::Cause::failed, sockets_.name(sockets_.rank()), message});
    throw Error(message);
  }
  const bool same = theirs.identity == identity && theirs.differs == 0 && theirs.nbytes == in.size();
  both[1].clear();
  if (same) {
    both[1].add(in.data(), in.size());
  } else if (theirs.nbytes > 0) {
    waste_.resize(theirs.nbytes);
    both[1].add(waste_.data(), waste_.size());
  }
  sockets_.move(both);
  send_ = std::move(both[0]), recv_ = std::move(both[1]);
  return differs || !same;
}

void TcpArrival::compare_whole(const Signature& signature) {
  const auto world = static_cast<std::size_t>(sockets_.world_size());
  reserve(world * sizeof(Signature));
  std::memcpy(cargo_.data(), &signature, sizeof signature);
  for (int distance = 1; distance < sockets_.world_size(); distance *= 2) {
    const auto slots = static_cast<std::size_t>(std::min(distance, sockets_.world_size() - distance));
    const auto at = static_cast<std::size_t>(distance) * sizeof(Signature);
    send_.clear(), recv_.clear();
    send_.peer = (sockets_.rank() + distance) % sockets_.world_size();
    recv_.peer = (sockets_.rank() - distance + sockets_.world_size()) % sockets_.world_size();
    send_.add(cargo_.data(), slots * sizeof(Signature));
    recv_.add(cargo_.data() + at, slots * sizeof(Signature));
    TcpTransfer both[] = {std::move(send_), std::move(recv_)};
    sockets_.move(both);
    send_ = std::move(both[0]), recv_ = std::move(both[1]);
  }
  std::vector<Signature> signatures(world);
  for (int r = 0; r < sockets_.world_size(); ++r) {
    Signature& copy = signatures[static_cast<std::size_t>(r)];
    std::memcpy(static_cast<void*>(&copy), block(r, sizeof(Signature)), sizeof copy);
    copy.name[sizeof(copy.name) - 1] = copy.site[sizeof(copy.site) - 1] = '\0';
  }
  on_mismatch(signatures);
  throw CollectiveMismatch(text(describe(signature), ": other ranks called a different operation"));
}

}  // namespace zcomm::coll
