// Copies at offsets that peers publish (coll/shm/peer_copy.hpp).
#include "coll/shm/peer_copy.hpp"

#include <algorithm>
#include <cstring>

#include "coll/split_counts.hpp"
#include "device/kernels.hpp"

namespace zcomm::coll {
namespace {

bool has_one_root(const Signature& signature) { return signature.kind != OpKind::all_to_all; }

/// gather and scatter: only the root's side counts, because only there can all ranks share the work.
Path rooted_path(const Signature& root, std::size_t slot_nbytes) {
  constexpr std::size_t kPlaceNbytes = 16;  // of each buffer
  const bool large = root.count * size_of(root.dtype) > slot_nbytes;
  if (!large || root.buffers * kPlaceNbytes > slot_nbytes) return Path::staged;
  if (root.kind == OpKind::gather) return root.place_out != 0 ? Path::push : Path::staged;
  return root.place_in != 0 ? Path::pull : Path::staged;
}

Path exchange_path(int world_size, std::size_t slot_nbytes, const SignatureOf& signature_of) {
  bool in = true, out = true;
  std::size_t longest = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    const Signature& signature = signature_of(rank);
    in &= signature.place_in != 0;
    out &= signature.place_out != 0;
    longest = std::max(longest, stream_nbytes(signature));
  }
  if (longest <= slot_nbytes) return Path::staged;
  return in ? Path::pull : out ? Path::push : Path::staged;
}

void copy_unless_same(void* to, const void* from, std::size_t nbytes) {
  if (to != from && nbytes > 0) device::copy(to, from, nbytes);
}

}  // namespace

Path choose_peer_copy_path(const Signature& own, int world_size, std::size_t slot_nbytes,
                           const SignatureOf& signature_of) {
  if (has_one_root(own)) return rooted_path(signature_of(own.root), slot_nbytes);
  return exchange_path(world_size, slot_nbytes, signature_of);
}

PeerCopyPath::PeerCopyPath(const HostMemory& memory, Liveness& liveness, SlotRing& slot_ring,
                           const SymmetricMemory& symmetric)
    : memory_(memory),
      liveness_(liveness),
      slot_ring_(slot_ring),
      symmetric_(symmetric),
      rank_(memory.rank()),
      world_size_(memory.world_size()) {}

bool PeerCopyPath::run(const Operation& operation, Path path) {
  show_offsets(operation, path);
  const bool agreed = all_reach(reach(operation, path));
  if (agreed) {
    if (has_one_root(operation.signature))
      copy(operation, path);
    else
      exchange(operation, path);
  }
  slot_ring_.release(slot_ring_.base() + 1);
  if (agreed) finish(operation);
  slot_ring_.advance(2);
  pinned_.clear();
  return agreed;
}

PeerCopyPath::HeapOffset PeerCopyPath::offset_of_buffer(const Allocation* home, const void* data) {
  return home == nullptr ? HeapOffset{} : HeapOffset{home->id, home->offset_of(data)};
}

/// First step: the root, or every rank of all_to_all, shows where the buffers of its list lie.
void PeerCopyPath::show_offsets(const Operation& operation, Path path) {
  const std::uint32_t index = slot_ring_.base();
  if (!has_one_root(operation.signature) || operation.signature.root == rank_) {
    std::byte* slot = slot_ring_.claim(index);
    for (const Item& item : operation.items.all()) {
      const HeapOffset shown =
          path == Path::pull ? offset_of_buffer(item.in_home, item.in) : offset_of_buffer(item.out_home, item.out);
      std::memcpy(slot, &shown, sizeof(shown));
      slot += sizeof(shown);
    }
  }
  slot_ring_.show(index);
}

/// Finds the memory that this rank reads or writes; false if it lacks an allocation.
bool PeerCopyPath::reach(const Operation& operation, Path path) {
  const auto items = operation.items.all();
  const Signature& signature = operation.signature;
  remote_.assign(items.size(), nullptr);
  bool reached = true;
  for (std::size_t i = 0; i < items.size() && reached; ++i) {
    if (has_one_root(signature)) {
      if (rank_ != signature.root && items[i].count > 0) reached = reach_one(i, signature.root, i);
    } else if (static_cast<int>(i) != rank_) {
      const std::size_t count = path == Path::pull ? items[i].out_count : items[i].count;
      if (count > 0) reached = reach_one(i, static_cast<int>(i), static_cast<std::size_t>(rank_));
    }
  }
  slot_ring_.release(slot_ring_.base());
  return reached;
}

bool PeerCopyPath::reach_one(std::size_t index, int peer, std::size_t offset_index) {
  HeapOffset shown;
  std::memcpy(&shown, slot_ring_.see(peer, slot_ring_.base()) + offset_index * sizeof(shown), sizeof(shown));
  if (pinned_.empty() || pinned_.back()->id != shown.id) {
    auto allocation = symmetric_.pin(shown.id);
    if (!allocation) return false;
    pinned_.push_back(std::move(allocation));
  }
  remote_[index] = pinned_.back()->base(peer) + shown.offset;
  return true;
}

/// Second step: each rank publishes whether it found all buffers.
bool PeerCopyPath::all_reach(bool reached) {
  const std::uint32_t index = slot_ring_.base() + 1;
  *slot_ring_.claim(index) = std::byte{reached};
  slot_ring_.show(index);
  for (int q = 0; q < world_size_; ++q)
    if (q != rank_) reached &= *slot_ring_.see(q, index) != std::byte{0};
  return reached;
}

/// gather and scatter: each rank moves its own part.
void PeerCopyPath::copy(const Operation& operation, Path path) {
  const auto items = operation.items.all();
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    const std::size_t nbytes = item.count * size_of(operation.signature.dtype);
    if (nbytes == 0) continue;
    const std::size_t begin = static_cast<std::size_t>(rank_) * nbytes;
    const bool at_root = operation.signature.root == rank_;
    if (path == Path::push)
      copy_unless_same((at_root ? item.out : remote_[i]) + begin, item.in, nbytes);
    else
      copy_unless_same(item.out, (at_root ? item.in : remote_[i]) + begin, nbytes);
  }
}

void PeerCopyPath::exchange(const Operation& operation, Path path) {
  const auto items = operation.items.all();
  const std::size_t element_nbytes = size_of(operation.signature.dtype);
  for (int i = 0; i < world_size_; ++i) {
    const int peer = (rank_ + i) % world_size_;  // not all at the same rank's memory
    const auto q = static_cast<std::size_t>(peer);
    const Item& item = items[q];
    if (peer == rank_)
      copy_unless_same(item.out, item.in, item.count * element_nbytes);
    else if (path == Path::pull)
      copy_unless_same(item.out, remote_[q], item.out_count * element_nbytes);
    else
      copy_unless_same(remote_[q], item.in, item.count * element_nbytes);
  }
}

/// Waits until no peer reads or writes this rank's memory any more.
void PeerCopyPath::finish(const Operation& operation) {
  if (!has_one_root(operation.signature) || operation.signature.root == rank_)
    liveness_.wait_for_peers(Stage::copied_out, slot_ring_.base() + 2);
}

}  // namespace zcomm::coll
