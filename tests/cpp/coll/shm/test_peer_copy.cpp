// PeerCopyPath in isolation: all ranks or none take it, and which rank waits for which.
#include "coll/shm/peer_copy.hpp"
#include "coll/support/comm_world.hpp"

using namespace zcomm;
using namespace zcomm::coll;
using namespace zcomm::test;

namespace {

/// The parts of an engine.
struct Parts {
  std::shared_ptr<net::Mesh> mesh;
  SymmetricMemory symmetric;
  HostMemory memory;
  Liveness liveness;
  SlotRing slot_ring;
  PeerCopyPath peer_copy;
  SpareItems spares;
  Signature entered;

  explicit Parts(Rank& self)
      : mesh(self.mesh),
        memory(*mesh, small_slots()),
        liveness(mesh, memory, {.timeout_s = 30}),
        slot_ring(memory, liveness),
        peer_copy(memory, liveness, slot_ring, symmetric) {
    liveness.begin(entered);
  }

  std::shared_ptr<SymmetricBuffer> allocate(std::size_t nbytes) { return symmetric.make(*mesh, nbytes, false, 30); }

  bool run(OpKind kind, std::span<const ConstBuffer> in, std::span<const Buffer> out, int root, Path path) {
    Operation operation;
    const Request request{.kind = kind, .in = in, .out = out, .root = root};
    fill(operation, spares, request, memory.rank(), memory.world_size(), symmetric);
    return peer_copy.run(operation, path);
  }
};

constexpr std::size_t kCount = std::size_t{8} << 20;

bool all_are(const std::byte* data, std::size_t count, int value) {
  for (std::size_t i = 0; i < count; ++i)
    if (data[i] != static_cast<std::byte>(value)) return false;
  return true;
}

}  // namespace

TEST(peer_copy, the_root_waits_until_all_is_there) {
  run_world(3, small_slots(), [](Rank& self) {
    Parts parts(self);
    auto whole = parts.allocate(3 * kCount);
    const int root = 1;
    const auto me = static_cast<std::size_t>(self.rank);
    std::memset(whole->data() + me * kCount, self.rank + 1, kCount);
    const ConstBuffer in{whole->data() + me * kCount, kCount};  // in place at root, which has nothing to copy itself
    const Buffer out{whole->data(), 3 * kCount};
    EXPECT_TRUE(parts.run(OpKind::gather, {&in, 1}, {&out, self.rank == root ? 1u : 0u}, root, Path::push));
    for (int q = 0; q < 3 && self.rank == root; ++q)
      EXPECT_TRUE(all_are(whole->data() + static_cast<std::size_t>(q) * kCount, kCount, q + 1));
    self.comm->barrier().wait();
  });
}

TEST(peer_copy, the_root_waits_until_all_is_read) {
  run_world(3, small_slots(), [](Rank& self) {
    Parts parts(self);
    auto whole = parts.allocate(3 * kCount);
    std::memset(whole->data(), 7, 3 * kCount);
    std::vector<std::byte> part(kCount);
    const ConstBuffer in{whole->data(), 3 * kCount};
    const Buffer out{self.rank == 0 ? whole->data() : part.data(), kCount};
    EXPECT_TRUE(parts.run(OpKind::scatter, {&in, self.rank == 0 ? 1u : 0u}, {&out, 1}, 0, Path::pull));
    if (self.rank == 0) std::memset(whole->data(), 9, 3 * kCount);  // its own again
    if (self.rank != 0) EXPECT_TRUE(all_are(part.data(), kCount, 7));
    self.comm->barrier().wait();
  });
}

TEST(peer_copy, every_rank_waits_in_all_to_all) {
  run_world(3, small_slots(), [](Rank& self) {
    Parts parts(self);
    auto memory = parts.allocate(2 * kCount);
    std::byte *give = memory->data(), *take = give + kCount;
    const auto right = static_cast<std::size_t>((self.rank + 1) % 3),
               left = static_cast<std::size_t>((self.rank + 2) % 3);
    for (const Path path : {Path::pull, Path::push}) {
      std::memset(give, self.rank + 1, kCount);
      std::memset(take, 0, kCount);
      self.comm->barrier().wait();
      std::vector<ConstBuffer> in(3, {nullptr, 0});
      std::vector<Buffer> out(3, {nullptr, 0});
      in[right] = {give, kCount}, out[left] = {take, kCount};
      EXPECT_TRUE(parts.run(OpKind::all_to_all, in, out, -1, path));
      std::memset(give, 99, kCount);  // its own again
      EXPECT_TRUE(all_are(take, kCount, static_cast<int>(left) + 1));
      self.comm->barrier().wait();
    }
  });
}

TEST(peer_copy, one_rank_without_the_memory_is_enough_to_refuse) {
  run_world(3, small_slots(), [](Rank& self) {
    Parts parts(self);
    auto whole = parts.allocate(300);
    if (self.rank == 2) whole.reset();
    std::vector<std::byte> part(100, std::byte{1});
    const ConstBuffer in{part.data(), 100};
    const Buffer out{self.rank == 0 ? whole->data() : nullptr, 300};
    for (int round = 0; round < 5; ++round) {
      EXPECT_FALSE(parts.run(OpKind::gather, {&in, 1}, {&out, self.rank == 0 ? 1u : 0u}, 0, Path::push));
      if (self.rank == 0) EXPECT_TRUE(all_are(whole->data(), 300, 0));
    }
    self.comm->barrier().wait();
  });
}

TEST(peer_copy, pinned_memory_stays_mapped) {
  run_world(2, small_slots(), [](Rank& self) {
    Parts parts(self);
    auto buffer = parts.allocate(5000);
    std::byte* data = buffer->data();
    data[4999] = std::byte{5};
    auto pin = parts.symmetric.pin(1);
    EXPECT_TRUE(pin != nullptr && parts.symmetric.pin(2) == nullptr);
    buffer.reset();
    EXPECT_EQ(static_cast<int>(data[4999]), 5);
    EXPECT_TRUE(parts.symmetric.pin(1) == nullptr);  // only an existing pin keeps it
    EXPECT_TRUE(parts.symmetric.find(data, 1) == nullptr);
    EXPECT_EQ(parts.symmetric.memory().symmetric_nbytes, 0u);
    self.comm->barrier().wait();
  });
}

TEST(peer_copy, what_signatures_choose) {
  std::vector<Signature> signatures(3);
  const auto choose = [&] {
    return choose_peer_copy_path(signatures[0], 3, 4096, [&](int rank) -> const Signature& {
      return signatures[static_cast<std::size_t>(rank)];
    });
  };
  const auto set = [&](OpKind kind, std::uint64_t count) {
    signatures.assign(3, Signature{});
    for (Signature& signature : signatures)
      signature.kind = kind, signature.root = 1, signature.count = count, signature.buffers = 1;
  };
  set(OpKind::gather, 100000);
  signatures[0].place_out = signatures[2].place_out = 1;  // empty lists
  EXPECT_TRUE(choose() == Path::staged);
  signatures[1].place_out = 77;
  EXPECT_TRUE(choose() == Path::push);
  for (Signature& signature : signatures) signature.buffers = 1000;
  EXPECT_TRUE(choose() == Path::staged);  // places do not fit a slot
  set(OpKind::scatter, 100000);
  signatures[0].place_in = signatures[2].place_in = 1;
  EXPECT_TRUE(choose() == Path::staged);
  signatures[1].place_in = 77;
  EXPECT_TRUE(choose() == Path::pull);
  for (Signature& signature : signatures) signature.count = 10;
  EXPECT_TRUE(choose() == Path::staged);  // fits a slot
  set(OpKind::all_to_all, 0);
  for (Signature& signature : signatures) signature.counts[1] = 100, signature.place_in = 5, signature.place_out = 6;
  EXPECT_TRUE(choose() == Path::staged);
  signatures[2].counts[1] = 5000;
  EXPECT_TRUE(choose() == Path::pull);
  signatures[0].place_in = 0;
  EXPECT_TRUE(choose() == Path::push);
  signatures[1].place_out = 0;
  EXPECT_TRUE(choose() == Path::staged);
}
