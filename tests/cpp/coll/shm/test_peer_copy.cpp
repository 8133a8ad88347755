// The told path by itself: that it is taken at all, by all ranks or by none, and who waits for whom.
#include "coll/shm/peer_copy.hpp"
#include "coll/support/comm_world.hpp"

using namespace zcomm;
using namespace zcomm::coll;
using namespace zcomm::test;

namespace {

/// What an engine has, without one.
struct Parts {
  std::shared_ptr<net::Mesh> mesh;
  SymmetricMemory symmetric;
  HostMemory memory;
  Watch watch;
  SlotTurns turns;
  ToldPath told;
  SpareItems spares;
  Header entered;

  explicit Parts(Rank& self)
      : mesh(self.mesh),
        memory(*mesh, small_slots()),
        watch(mesh, memory, 30),
        turns(memory, watch),
        told(memory, watch, turns, symmetric) {
    watch.begin(entered);
  }

  std::shared_ptr<SymmetricBuffer> allocate(std::size_t nbytes) { return symmetric.make(*mesh, nbytes, false, 30); }

  bool run(OpKind kind, std::span<const ConstBuffer> in, std::span<const Buffer> out, int root, Path path) {
    Operation operation;
    const Request request{.kind = kind, .in = in, .out = out, .root = root};
    fill(operation, spares, request, memory.rank(), memory.world_size(), symmetric);
    return told.run(operation, path);
  }
};

constexpr std::size_t kCount = std::size_t{8} << 20;

bool all_are(const std::byte* data, std::size_t count, int value) {
  for (std::size_t i = 0; i < count; ++i)
    if (data[i] != static_cast<std::byte>(value)) return false;
  return true;
}

}  // namespace

TEST(told, the_root_waits_until_all_is_there) {
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

TEST(told, the_root_waits_until_all_is_read) {
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

TEST(told, every_rank_waits_in_all_to_all) {
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

TEST(told, one_rank_without_the_memory_is_enough_to_refuse) {
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

TEST(told, pinned_memory_stays_mapped) {
  run_world(2, small_slots(), [](Rank& self) {
    Parts parts(self);
    auto buffer = parts.allocate(5000);
    std::byte* data = buffer->data();
    data[4999] = std::byte{5};
    auto pin = parts.symmetric.pin(1);
    EXPECT_TRUE(pin != nullptr && parts.symmetric.pin(2) == nullptr);
    buffer.reset();
    EXPECT_EQ(static_cast<int>(data[4999]), 5);
    EXPECT_TRUE(parts.symmetric.pin(1) == nullptr);  // dropped is dropped: only who holds it already goes on
    EXPECT_TRUE(parts.symmetric.find(data, 1) == nullptr);
    EXPECT_EQ(parts.symmetric.memory().symmetric_nbytes, 0u);
    self.comm->barrier().wait();
  });
}

TEST(told, what_headers_choose) {
  std::vector<Header> headers(3);
  const auto choose = [&] {
    return choose_told_path(headers[0], 3, 4096,
                            [&](int rank) -> const Header& { return headers[static_cast<std::size_t>(rank)]; });
  };
  const auto set = [&](OpKind kind, std::uint64_t count) {
    headers.assign(3, Header{});
    for (Header& header : headers) header.kind = kind, header.root = 1, header.count = count, header.buffers = 1;
  };
  set(OpKind::gather, 100000);
  headers[0].place_out = headers[2].place_out = 1;  // empty lists
  EXPECT_TRUE(choose() == Path::staged);
  headers[1].place_out = 77;
  EXPECT_TRUE(choose() == Path::push);
  for (Header& header : headers) header.buffers = 1000;
  EXPECT_TRUE(choose() == Path::staged);  // places do not fit a slot
  set(OpKind::scatter, 100000);
  headers[0].place_in = headers[2].place_in = 1;
  EXPECT_TRUE(choose() == Path::staged);
  headers[1].place_in = 77;
  EXPECT_TRUE(choose() == Path::pull);
  for (Header& header : headers) header.count = 10;
  EXPECT_TRUE(choose() == Path::staged);  // fits a slot
  set(OpKind::all_to_all, 0);
  for (Header& header : headers) header.counts[1] = 100, header.place_in = 5, header.place_out = 6;
  EXPECT_TRUE(choose() == Path::staged);
  headers[2].counts[1] = 5000;
  EXPECT_TRUE(choose() == Path::pull);
  headers[0].place_in = 0;
  EXPECT_TRUE(choose() == Path::push);
  headers[1].place_out = 0;
  EXPECT_TRUE(choose() == Path::staged);
}
