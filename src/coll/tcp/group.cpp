// See group.hpp.
#include "coll/tcp/group.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "net/tcp.hpp"

namespace zcomm::coll {
namespace {

// Where one algorithm gives way to the next; ZCOMM_LINK_ALGO overrides.
// Small: P times the data arrives at everyone in log2(P) messages, which pays while latency is most of it.
constexpr std::size_t kSmallNbytes = 16 << 10;  // of all ranks' data
// Ring: 2 (P-1) steps, each with a chunk of N/P bytes on the way; worth it when a chunk takes longer than a step's
// latency. For large worlds that is a large N, so they use recursive halving and doubling for longer.
constexpr std::size_t kRingChunkNbytes = 64 << 10;

struct Options {
  std::uint64_t segment_nbytes, sockets_after, sockets_before, algorithm;
};

}  // namespace

LinkGroup::LinkGroup(std::shared_ptr<net::Mesh> mesh, std::vector<int> members, std::vector<LinkSockets> links,
                     LinkOptions options)
    : post_(mesh->rank(), take_message_sockets(links), fate_),
      net_(mesh, members, pick(links, members), post_, options.timeout_s),
      messenger_(post_, options.timeout_s),
      guard_(net_),
      small_(net_, guard_),
      direct_(net_),
      halving_(net_),
      forced_(read_env().link_algo.value_or("")) {
  agree_on_options(options);
}

std::vector<UniqueFd> LinkGroup::take_message_sockets(std::vector<LinkSockets>& links) {
  std::vector<UniqueFd> sockets(links.size());
  for (std::size_t r = 0; r < links.size(); ++r) {
    if (links[r].empty()) continue;
    for (const UniqueFd& socket : links[r]) net::make_prompt(socket.get(), static_cast<int>(r));
    const std::size_t at = links[r].size() == 1 ? 0 : 1;
    sockets[r] = std::move(links[r][at]);
    links[r].erase(links[r].begin() + static_cast<std::ptrdiff_t>(at));
  }
  return sockets;
}

std::vector<LinkSockets> LinkGroup::pick(std::vector<LinkSockets>& links, const std::vector<int>& members) {
  std::vector<LinkSockets> picked;
  for (const int member : members) picked.push_back(std::move(links[static_cast<std::size_t>(member)]));
  return picked;
}

/// The ring needs the same number of sockets, and the same segments, on every rank.
void LinkGroup::agree_on_options(const LinkOptions& options) {
  const int world = world_size();
  Header header;
  header.kind = OpKind::duplicate;
  set_name(header, "create_linked", "");
  seal(header);
  net_.begin(header);
  guard_.reserve(sizeof(Options) * static_cast<std::size_t>(world));
  const auto sockets_to = [&](int peer) { return static_cast<std::uint64_t>(net_.lane_count(peer)); };
  const Options mine{options.segment_nbytes, world > 1 ? sockets_to((rank() + 1) % world) : 0,
                     world > 1 ? sockets_to((rank() + world - 1) % world) : 0,
                     mix(1, forced_.empty() ? 0 : forced_[0])};
  std::memcpy(guard_.block(rank(), sizeof mine), &mine, sizeof mine);
  guard_.enter_gathering(header, sizeof mine);
  std::uint64_t sockets = mine.sockets_after;
  for (int r = 0; r < world; ++r) {
    Options theirs, before;
    std::memcpy(&theirs, guard_.block(r, sizeof theirs), sizeof theirs);
    std::memcpy(&before, guard_.block((r + 1) % world, sizeof before), sizeof before);
    if (theirs.segment_nbytes != mine.segment_nbytes || theirs.algorithm != mine.algorithm)
      throw CollectiveMismatch(text("segment_nbytes=", mine.segment_nbytes, " and ZCOMM_LINK_ALGO='", forced_,
                                    "' on rank ", net_.name(rank()), ", not the same on rank ", net_.name(r), " (",
                                    theirs.segment_nbytes, ")"));
    if (theirs.sockets_after != before.sockets_before)
      throw CollectiveMismatch(text("rank ", net_.name(r), " has ", theirs.sockets_after + 1, " links to rank ",
                                    net_.name((r + 1) % world), ", which has ", before.sockets_before + 1));
    sockets = std::min(sockets, theirs.sockets_after);
  }
  ring_ = std::make_unique<RingPath>(net_, options.segment_nbytes, static_cast<int>(sockets));
}

void LinkGroup::close() noexcept {
  net_.close();
  messenger_.close();
}

std::size_t LinkGroup::nbytes() const {
  return guard_.nbytes() + direct_.nbytes() + halving_.nbytes() + ring_->nbytes() + chunk_.capacity();
}

void LinkGroup::fail(FailureReport::Cause cause, int rank, std::string message) noexcept {
  net_.fail({cause, rank, std::move(message)});
}

void LinkGroup::run(Operation& operation, const Header* stands_for) {
  operation.header.sequence = ++sequence_;
  const Header& shown = stands_for != nullptr ? *stands_for : operation.header;
  try {
    net_.begin(shown);
    const LinkAlgorithm algorithm = choose(operation);
    guard_.show(stands_for);
    if (algorithm == LinkAlgorithm::small)
      small_.run(operation);
    else if (operation.header.kind == OpKind::all_to_all)
      all_to_all(operation);
    else
      guard_.enter(operation.header);
    if (algorithm != LinkAlgorithm::small) work(operation, algorithm);
  } catch (const CollectiveMismatch&) {
    throw;  // the others see it by themselves, or were told
  } catch (const Interrupted&) {
    fail(FailureReport::Cause::left, net_.name(rank()), {});
    throw;
  } catch (const std::exception& error) {
    if (net_.is_closing())
      fail(FailureReport::Cause::left, net_.name(rank()), {});
    else
      fail(FailureReport::Cause::failed, net_.name(rank()), text(describe(shown), ": ", error.what()));
    throw;
  }
}

LinkAlgorithm LinkGroup::choose(const Operation& operation) const {
  const OpKind kind = operation.header.kind;
  if (!moves_data(kind) || kind == OpKind::all_to_all || world_size() == 1) return LinkAlgorithm::direct;
  const auto world = static_cast<std::size_t>(world_size());
  const std::size_t brought = LinkSmall::cargo_nbytes(operation, world_size());
  const bool from_root = kind == OpKind::broadcast || kind == OpKind::scatter;
  if (forced_.empty() && brought * (from_root ? 1 : world) <= kSmallNbytes) return LinkAlgorithm::small;
  if (kind == OpKind::gather || kind == OpKind::scatter) return LinkAlgorithm::direct;
  if (!forced_.empty()) return forced_ == "ring" ? LinkAlgorithm::ring : LinkAlgorithm::direct;
  const std::size_t chunk = kind == OpKind::all_gather ? brought : brought / world;
  return chunk < kRingChunkNbytes ? LinkAlgorithm::direct : LinkAlgorithm::ring;
}

void LinkGroup::work(const Operation& operation, LinkAlgorithm algorithm) {
  const Header& header = operation.header;
  const std::span<const Item> items = operation.items.all();
  const std::size_t size = size_of(header.dtype);
  using Shape = LinkLayout::Shape;
  layout_.set(items, in_place(header.kind) ? Shape::whole : Shape::parts, world_size());
  switch (header.kind) {
    case OpKind::all_reduce:
      return all_reduce(operation, algorithm);
    case OpKind::reduce:
      return reduce(operation, algorithm);
    case OpKind::reduce_scatter:
      return reduce_scatter(operation, algorithm, nullptr);
    case OpKind::all_gather:
      direct_.place_own(layout_, size);
      return all_gather(operation, algorithm);
    case OpKind::broadcast:
      return broadcast(operation, algorithm);
    case OpKind::gather:
      if (header.root == rank()) direct_.place_own(layout_, size);
      return direct_.gather(layout_, size, header.root, nullptr);
    case OpKind::scatter:
      return direct_.scatter(layout_, size, header.root, Shape::parts);
    default:
      return;  // the entry was all
  }
}

void LinkGroup::ring(const Operation& operation, bool reduces, bool gathers, std::byte* result) {
  ring_->run({&layout_, &operation.header, identity_of(operation.header), reduces, gathers, result});
}

void LinkGroup::all_reduce(const Operation& operation, LinkAlgorithm algorithm) {
  if (world_size() == 1) return;
  if (algorithm == LinkAlgorithm::ring)
    ring(operation, true, true, nullptr);
  else
    halving_.all_reduce(layout_, operation.header);
}

/// Each rank reduces its chunk, and the root collects them.
void LinkGroup::reduce(const Operation& operation, LinkAlgorithm algorithm) {
  if (world_size() == 1) return;
  const std::size_t size = size_of(operation.header.dtype);
  const bool is_root = operation.header.root == rank();
  if (!is_root) chunk_.resize(std::max(chunk_.size(), layout_.count(rank()) * size + 1));  // never null
  reduce_scatter(operation, algorithm, is_root ? nullptr : chunk_.data());
  direct_.gather(layout_, size, operation.header.root, is_root ? nullptr : chunk_.data());
}

void LinkGroup::reduce_scatter(const Operation& operation, LinkAlgorithm algorithm, std::byte* result) {
  if (algorithm == LinkAlgorithm::ring)
    ring(operation, true, false, result);
  else
    direct_.reduce_scatter(layout_, operation.header, result);
}

void LinkGroup::all_gather(const Operation& operation, LinkAlgorithm algorithm) {
  if (algorithm == LinkAlgorithm::ring)
    ring(operation, false, true, nullptr);
  else
    direct_.all_gather(layout_, size_of(operation.header.dtype));
}

/// Large: every rank gets a chunk from the root, and they exchange them (van de Geijn).
void LinkGroup::broadcast(const Operation& operation, LinkAlgorithm algorithm) {
  const std::size_t size = size_of(operation.header.dtype);
  const int root = operation.header.root;
  if (algorithm != LinkAlgorithm::ring) return direct_.broadcast(layout_, size, root);
  direct_.scatter(layout_, size, root, LinkLayout::Shape::whole);
  ring(operation, false, true, nullptr);
}

/// What each rank sends and expects goes round in the entry, so all ranks find the same mismatch.
void LinkGroup::all_to_all(const Operation& operation) {
  const std::span<const Item> items = operation.items.all();
  const auto world = static_cast<std::size_t>(world_size());
  const std::size_t row = 2 * world * sizeof(std::uint64_t);
  const auto entry = [&](std::size_t of, std::size_t index) {
    return guard_.block(static_cast<int>(of), row) + index * sizeof(std::uint64_t);
  };
  guard_.reserve(row * world);
  for (std::size_t q = 0; q < world; ++q) {
    const std::uint64_t sent = items[q].count, expected = items[q].out_count;
    std::memcpy(entry(static_cast<std::size_t>(rank()), q), &sent, sizeof sent);
    std::memcpy(entry(static_cast<std::size_t>(rank()), world + q), &expected, sizeof expected);
  }
  guard_.enter_gathering(operation.header, row);
  for (std::size_t from = 0; from < world; ++from) {
    for (std::size_t to = 0; to < world; ++to) {
      std::uint64_t sent, expected;
      std::memcpy(&sent, entry(from, to), sizeof sent);
      std::memcpy(&expected, entry(to, world + from), sizeof expected);
      if (sent != expected)
        throw CollectiveMismatch(text(describe(operation.header), ": rank ", net_.name(static_cast<int>(from)),
                                      " sends ", sent, " elements to rank ", net_.name(static_cast<int>(to)),
                                      ", which expects ", expected));
    }
  }
  direct_.all_to_all(items, size_of(operation.header.dtype));
}

}  // namespace zcomm::coll
