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

// Limits between the algorithms; ZCOMM_LINK_ALGO overrides. Small: P times the data arrives at every rank in log2(P)
// messages, which pays while latency dominates.
constexpr std::size_t kSmallNbytes = 16 << 10;  // of all ranks' data
// Ring: 2 (P-1) steps, each with a chunk of N/P bytes in transit; worth it when a chunk takes longer than a step's
// latency. For large worlds that is a large N, so they use recursive halving and doubling for longer.
constexpr std::size_t kRingChunkNbytes = 64 << 10;

struct Options {
  std::uint64_t segment_nbytes, sockets_after, sockets_before, algorithm;
};

}  // namespace

TcpGroup::TcpGroup(std::shared_ptr<net::Mesh> mesh, std::vector<int> members, std::vector<PeerSockets> links,
                   TcpOptions options)
    : control_(mesh->rank(), take_message_sockets(links), failure_),
      sockets_(mesh, members, pick(links, members), control_, times_of(options)),
      messenger_(control_, times_of(options)),
      arrival_(sockets_),
      small_(sockets_, arrival_),
      direct_(sockets_),
      halving_(sockets_),
      forced_(read_env().link_algo.value_or("")) {
  agree_on_options(options);
}

std::vector<UniqueFd> TcpGroup::take_message_sockets(std::vector<PeerSockets>& links) {
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

std::vector<PeerSockets> TcpGroup::pick(std::vector<PeerSockets>& links, const std::vector<int>& members) {
  std::vector<PeerSockets> picked;
  for (const int member : members) picked.push_back(std::move(links[static_cast<std::size_t>(member)]));
  return picked;
}

/// The ring needs the same number of sockets, and the same segments, on every rank.
void TcpGroup::agree_on_options(const TcpOptions& options) {
  const int world = world_size();
  Signature signature;
  signature.kind = OpKind::duplicate;
  set_name(signature, "create_linked", "");
  seal(signature);
  sockets_.begin(signature);
  arrival_.reserve(sizeof(Options) * static_cast<std::size_t>(world));
  const auto sockets_to = [&](int peer) { return static_cast<std::uint64_t>(sockets_.socket_count(peer)); };
  const Options mine{options.segment_nbytes, world > 1 ? sockets_to((rank() + 1) % world) : 0,
                     world > 1 ? sockets_to((rank() + world - 1) % world) : 0,
                     mix(1, forced_.empty() ? 0 : forced_[0])};
  std::memcpy(arrival_.block(rank(), sizeof mine), &mine, sizeof mine);
  arrival_.enter_gathering(signature, sizeof mine);
  std::uint64_t sockets = mine.sockets_after;
  for (int r = 0; r < world; ++r) {
    Options theirs, before;
    std::memcpy(&theirs, arrival_.block(r, sizeof theirs), sizeof theirs);
    std::memcpy(&before, arrival_.block((r + 1) % world, sizeof before), sizeof before);
    if (theirs.segment_nbytes != mine.segment_nbytes || theirs.algorithm != mine.algorithm)
      throw CollectiveMismatch(text("segment_nbytes=", mine.segment_nbytes, " and ZCOMM_LINK_ALGO='", forced_,
                                    "' on rank ", sockets_.name(rank()), ", not the same on rank ", sockets_.name(r),
                                    " (", theirs.segment_nbytes, ")"));
    if (theirs.sockets_after != before.sockets_before)
      throw CollectiveMismatch(text("rank ", sockets_.name(r), " has ", theirs.sockets_after + 1, " links to rank ",
                                    sockets_.name((r + 1) % world), ", which has ", before.sockets_before + 1));
    sockets = std::min(sockets, theirs.sockets_after);
  }
  ring_ = std::make_unique<TcpRing>(sockets_, options.segment_nbytes, static_cast<int>(sockets));
}

void TcpGroup::close() noexcept {
  sockets_.close();
  messenger_.close();
}

std::size_t TcpGroup::nbytes() const {
  return arrival_.nbytes() + direct_.nbytes() + halving_.nbytes() + ring_->nbytes() + chunk_.capacity();
}

void TcpGroup::fail(net::Cause cause, int rank, std::string message) noexcept {
  sockets_.fail({cause, rank, std::move(message)});
}

void TcpGroup::run(Operation& operation, const Signature* stands_for) {
  operation.signature.sequence = ++sequence_;
  const Signature& shown = stands_for != nullptr ? *stands_for : operation.signature;
  try {
    sockets_.begin(shown);
    const TcpAlgorithm algorithm = choose(operation);
    arrival_.show(stands_for);
    if (algorithm == TcpAlgorithm::small)
      small_.run(operation);
    else if (operation.signature.kind == OpKind::all_to_all)
      all_to_all(operation);
    else
      arrival_.enter(operation.signature);
    if (algorithm != TcpAlgorithm::small) work(operation, algorithm);
  } catch (const CollectiveMismatch&) {
    throw;  // the others see it themselves, or have received it
  } catch (const Interrupted&) {
    fail(net::Cause::left, sockets_.name(rank()), {});
    throw;
  } catch (const std::exception& error) {
    if (sockets_.is_closing())
      fail(net::Cause::left, sockets_.name(rank()), {});
    else
      fail(net::Cause::failed, sockets_.name(rank()), text(describe(shown), ": ", error.what()));
    throw;
  }
}

TcpAlgorithm TcpGroup::choose(const Operation& operation) const {
  const OpKind kind = operation.signature.kind;
  if (!moves_data(kind) || kind == OpKind::all_to_all || world_size() == 1) return TcpAlgorithm::direct;
  const auto world = static_cast<std::size_t>(world_size());
  const std::size_t brought = TcpSmall::cargo_nbytes(operation, world_size());
  const bool from_root = kind == OpKind::broadcast || kind == OpKind::scatter;
  if (forced_.empty() && brought * (from_root ? 1 : world) <= kSmallNbytes) return TcpAlgorithm::small;
  if (kind == OpKind::gather || kind == OpKind::scatter) return TcpAlgorithm::direct;
  if (reduces(kind) && operation.signature.order == ReduceOrder::rank) return TcpAlgorithm::direct;
  if (!forced_.empty()) return forced_ == "ring" ? TcpAlgorithm::ring : TcpAlgorithm::direct;
  const std::size_t chunk = kind == OpKind::all_gather ? brought : brought / world;
  return chunk < kRingChunkNbytes ? TcpAlgorithm::direct : TcpAlgorithm::ring;
}

void TcpGroup::work(const Operation& operation, TcpAlgorithm algorithm) {
  const Signature& signature = operation.signature;
  const std::span<const Item> items = operation.items.all();
  const std::size_t size = size_of(signature.dtype);
  using Shape = TcpChunks::Shape;
  chunks_.set(items, in_place(signature.kind) ? Shape::whole : Shape::parts, world_size());
  switch (signature.kind) {
    case OpKind::all_reduce:
      return all_reduce(operation, algorithm);
    case OpKind::reduce:
      return reduce(operation, algorithm);
    case OpKind::reduce_scatter:
      return reduce_scatter(operation, algorithm, nullptr);
    case OpKind::all_gather:
      direct_.place_own(chunks_, size);
      return all_gather(operation, algorithm);
    case OpKind::broadcast:
      return broadcast(operation, algorithm);
    case OpKind::gather:
      if (signature.root == rank()) direct_.place_own(chunks_, size);
      return direct_.gather(chunks_, size, signature.root, nullptr);
    case OpKind::scatter:
      return direct_.scatter(chunks_, size, signature.root, Shape::parts);
    default:
      return;  // the entry was sufficient
  }
}

void TcpGroup::ring(const Operation& operation, bool reduces, bool gathers, std::byte* result) {
  ring_->run({&chunks_, &operation.signature, identity_of(operation.signature), reduces, gathers, result});
}

void TcpGroup::all_reduce(const Operation& operation, TcpAlgorithm algorithm) {
  if (world_size() == 1) return;
  if (algorithm == TcpAlgorithm::ring) return ring(operation, true, true, nullptr);
  if (operation.signature.order == ReduceOrder::any) return halving_.all_reduce(chunks_, operation.signature);
  direct_.reduce_scatter(chunks_, operation.signature, nullptr);
  direct_.all_gather(chunks_, size_of(operation.signature.dtype));
}

/// Each rank reduces its chunk, and the root collects them.
void TcpGroup::reduce(const Operation& operation, TcpAlgorithm algorithm) {
  if (world_size() == 1) return;
  const std::size_t size = size_of(operation.signature.dtype);
  const bool is_root = operation.signature.root == rank();
  if (!is_root) chunk_.resize(std::max(chunk_.size(), chunks_.count(rank()) * size + 1));  // never null
  reduce_scatter(operation, algorithm, is_root ? nullptr : chunk_.data());
  direct_.gather(chunks_, size, operation.signature.root, is_root ? nullptr : chunk_.data());
}

void TcpGroup::reduce_scatter(const Operation& operation, TcpAlgorithm algorithm, std::byte* result) {
  if (algorithm == TcpAlgorithm::ring)
    ring(operation, true, false, result);
  else
    direct_.reduce_scatter(chunks_, operation.signature, result);
}

void TcpGroup::all_gather(const Operation& operation, TcpAlgorithm algorithm) {
  if (algorithm == TcpAlgorithm::ring)
    ring(operation, false, true, nullptr);
  else
    direct_.all_gather(chunks_, size_of(operation.signature.dtype));
}

/// Large: the root sends a chunk to every rank, and they exchange them (van de Geijn).
void TcpGroup::broadcast(const Operation& operation, TcpAlgorithm algorithm) {
  const std::size_t size = size_of(operation.signature.dtype);
  const int root = operation.signature.root;
  if (algorithm != TcpAlgorithm::ring) return direct_.broadcast(chunks_, size, root);
  direct_.scatter(chunks_, size, root, TcpChunks::Shape::whole);
  ring(operation, false, true, nullptr);
}

/// The entry carries each rank's counts to all, so all ranks find the same mismatch.
void TcpGroup::all_to_all(const Operation& operation) {
  const std::span<const Item> items = operation.items.all();
  const auto world = static_cast<std::size_t>(world_size());
  const std::size_t row = 2 * world * sizeof(std::uint64_t);
  const auto entry = [&](std::size_t of, std::size_t index) {
    return arrival_.block(static_cast<int>(of), row) + index * sizeof(std::uint64_t);
  };
  arrival_.reserve(row * world);
  for (std::size_t q = 0; q < world; ++q) {
    const std::uint64_t sent = items[q].count, expected = items[q].out_count;
    std::memcpy(entry(static_cast<std::size_t>(rank()), q), &sent, sizeof sent);
    std::memcpy(entry(static_cast<std::size_t>(rank()), world + q), &expected, sizeof expected);
  }
  arrival_.enter_gathering(operation.signature, row);
  for (std::size_t from = 0; from < world; ++from) {
    for (std::size_t to = 0; to < world; ++to) {
      std::uint64_t sent, expected;
      std::memcpy(&sent, entry(from, to), sizeof sent);
      std::memcpy(&expected, entry(to, world + from), sizeof expected);
      if (sent != expected)
        throw CollectiveMismatch(text(describe(operation.signature), ": rank ", sockets_.name(static_cast<int>(from)),
                                      " sends ", sent, " elements to rank ", sockets_.name(static_cast<int>(to)),
                                      ", which expects ", expected));
    }
  }
  direct_.all_to_all(items, size_of(operation.signature.dtype));
}

}  // namespace zcomm::coll
