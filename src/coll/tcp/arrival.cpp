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

LinkGuard::LinkGuard(LinkNet& net) : net_(net) {
  on_mismatch = [this](std::span<const Header> headers) {
    require_same(
        net_.world_size(), [&](int r) -> const Header& { return headers[static_cast<std::size_t>(r)]; },
        net_.members());
  };
}

void LinkGuard::reserve(std::size_t nbytes_of_all) {
  if (cargo_.size() < nbytes_of_all) cargo_.resize(nbytes_of_all);
}

std::byte* LinkGuard::block(int rank, std::size_t nbytes) {
  const int world = net_.world_size();
  return cargo_.data() + static_cast<std::size_t>((net_.rank() - rank + world) % world) * nbytes;
}

void LinkGuard::enter(const Header& header) { run(header, Mode::none, 0, -1); }

void LinkGuard::enter_gathering(const Header& header, std::size_t nbytes) { run(header, Mode::gather, nbytes, -1); }

void LinkGuard::enter_broadcasting(const Header& header, std::size_t nbytes, int root) {
  run(header, Mode::broadcast, nbytes, root);
}

void LinkGuard::run(const Header& header, Mode mode, std::size_t nbytes, int root) {
  const int world = net_.world_size(), rank = net_.rank();
  const std::uint64_t identity = mix(identity_of(header), shown_ != nullptr ? identity_of(*shown_) : 0);
  bool differs = false;
  for (int distance = 1; distance < world; distance *= 2) {
    std::span<const std::byte> out;
    std::span<std::byte> in;
    if (mode == Mode::gather) {  // slots [0, distance) are filled
      const auto slots = static_cast<std::size_t>(std::min(distance, world - distance));
      out = {cargo_.data(), slots * nbytes};
      in = {cargo_.data() + static_cast<std::size_t>(distance) * nbytes, slots * nbytes};
    } else if (mode == Mode::broadcast) {  // those within `distance` after the root have it
      const int mine = (rank - root + world) % world;
      const int theirs = (rank - distance - root + 2 * world) % world;
      const bool needed = (rank + distance - root + world) % world >= distance;
      if (mine < distance && needed) out = {block(root, nbytes), nbytes};
      if (theirs < distance && mine >= distance) in = {block(root, nbytes), nbytes};
    }
    differs = round(distance, identity, differs, out, in);
  }
  if (differs) compare_whole(shown_ != nullptr ? *shown_ : header);
  net_.entered();
}

/// Returns whether any difference is known by now.
bool LinkGuard::round(int distance, std::uint64_t identity, bool differs, std::span<const std::byte> out,
                      std::span<std::byte> in) {
  const int world = net_.world_size();
  const EntryFrame mine{EntryFrame::kMagic, static_cast<std::uint32_t>(distance), identity, out.size(), differs};
  EntryFrame theirs;
  send_.clear(), recv_.clear();
  send_.peer = (net_.rank() + distance) % world;
  recv_.peer = (net_.rank() - distance + world) % world;
  send_.add(&mine, sizeof mine);
  send_.add(out.data(), out.size());
  recv_.add(&theirs, sizeof theirs);
  LinkTransfer both[] = {std::move(send_), std::move(recv_)};
  // The head says how much follows, so it is read alone; sending goes on meanwhile.
  while (!both[1].done()) {
    const bool received = net_.advance(both[1], 0);
    const bool sent = !both[0].done() && net_.advance(both[0], 0);
    if (received || sent || both[1].done()) continue;
    net_.expect(both[1].peer, 0, POLLIN);
    if (!both[0].done()) net_.expect(both[0].peer, 0, POLLOUT);
    net_.wait();
  }
  if (theirs.magic != EntryFrame::kMagic || theirs.distance != mine.distance || theirs.nbytes > kMaxCargoNbytes) {
    const std::string message = text("what came from rank ", net_.name(both[1].peer),
                                     " is not the beginning of an operation: the streams are out of step");
    net_.fail({FailureReport::Cause::failed, net_.name(net_.rank()), message});
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
  net_.move(both);
  send_ = std::move(both[0]), recv_ = std::move(both[1]);
  return differs || !same;
}

void LinkGuard::compare_whole(const Header& header) {
  const auto world = static_cast<std::size_t>(net_.world_size());
  reserve(world * sizeof(Header));
  std::memcpy(cargo_.data(), &header, sizeof header);
  for (int distance = 1; distance < net_.world_size(); distance *= 2) {
    const auto slots = static_cast<std::size_t>(std::min(distance, net_.world_size() - distance));
    const auto at = static_cast<std::size_t>(distance) * sizeof(Header);
    send_.clear(), recv_.clear();
    send_.peer = (net_.rank() + distance) % net_.world_size();
    recv_.peer = (net_.rank() - distance + net_.world_size()) % net_.world_size();
    send_.add(cargo_.data(), slots * sizeof(Header));
    recv_.add(cargo_.data() + at, slots * sizeof(Header));
    LinkTransfer both[] = {std::move(send_), std::move(recv_)};
    net_.move(both);
    send_ = std::move(both[0]), recv_ = std::move(both[1]);
  }
  std::vector<Header> headers(world);
  for (int r = 0; r < net_.world_size(); ++r) {
    Header& copy = headers[static_cast<std::size_t>(r)];
    std::memcpy(static_cast<void*>(&copy), block(r, sizeof(Header)), sizeof copy);
    copy.name[sizeof(copy.name) - 1] = copy.site[sizeof(copy.site) - 1] = '\0';
  }
  on_mismatch(headers);
  throw CollectiveMismatch(text(describe(header), ": other ranks called a different operation"));
}

}  // namespace zcomm::coll
