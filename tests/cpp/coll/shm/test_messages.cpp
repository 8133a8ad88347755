// send and recv: values, lists, order by tag, any source, many in flight, threads, concurrent collectives.
#include <algorithm>
#include <numeric>

#include "coll/support/comm_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr DType kDTypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::int8,
                             DType::uint8,   DType::int32,   DType::int64,   DType::boolean};

/// The data of message `number` of `from`: bytes that identify sender, message and position.
std::vector<std::byte> message(int from, int number, std::size_t nbytes) {
  std::vector<std::byte> bytes(nbytes + 1);
  for (std::size_t i = 0; i < nbytes; ++i)
    bytes[i] = static_cast<std::byte>(i * 7 + i / 251 + static_cast<std::size_t>(from * 31 + number * 13));
  return bytes;
}

struct Message {  // one that a test sends or awaits
  std::vector<std::byte> bytes;
  std::size_t nbytes;
  Work work;
};

ConstBuffer all_of(const std::vector<std::byte>& bytes, std::size_t count) { return {bytes.data(), count}; }
Buffer all_of(std::vector<std::byte>& bytes, std::size_t count) { return {bytes.data(), count}; }

Message send(Rank& self, int dst, int tag, int number, std::size_t nbytes, bool async = true) {
  Message sent{message(self.rank, number, nbytes), nbytes, {}};
  const ConstBuffer buffer = all_of(std::as_const(sent.bytes), nbytes);
  sent.work = self.comm->send({&buffer, 1}, DType::uint8, dst, tag, {"m", async});
  return sent;
}

Message recv(Rank& self, int src, int tag, std::size_t nbytes, bool async = true, int* source = nullptr) {
  Message received{std::vector<std::byte>(nbytes + 1), nbytes, {}};
  const Buffer buffer = all_of(received.bytes, nbytes);
  received.work = self.comm->recv({&buffer, 1}, DType::uint8, src, tag, {"m", async}, source);
  return received;
}

void expect_is(Message& received, int from, int number) {
  received.work.wait();
  EXPECT_TRUE(received.bytes == message(from, number, received.nbytes));
}

}  // namespace

TEST(messages, all_dtypes_and_sizes) {
  run_worlds(2, 5, [](Rank& self) {
    const int next = (self.rank + 1) % self.world, previous = (self.rank + self.world - 1) % self.world;
    for (const DType dtype : kDTypes) {
      for (const std::size_t count : {0, 1, 7, 511, 1025, 20001}) {
        const std::size_t nbytes = count * size_of(dtype);
        const auto out = message(self.rank, static_cast<int>(dtype), nbytes);
        std::vector<std::byte> in(nbytes + 1);
        const ConstBuffer from = all_of(out, count);
        const Buffer to = all_of(in, count);
        Work sent = self.comm->send({&from, 1}, dtype, next, 3);
        int source = -1;
        self.comm->recv({&to, 1}, dtype, previous, 3, kBlocking, &source);
        EXPECT_EQ(source, previous);
        EXPECT_TRUE(in == message(previous, static_cast<int>(dtype), nbytes));
        sent.wait();
      }
    }
  });
}

TEST(messages, blocking_there_and_back) {
  run_worlds(2, 3, [](Rank& self) {
    if (self.rank > 1) return;
    const int peer = 1 - self.rank;
    for (const std::size_t nbytes : {0u, 8u, 4096u, 4097u, 100000u}) {
      for (int i = 0; i < 20; ++i) {
        if (self.rank == 0) send(self, peer, 0, i, nbytes, false);
        Message received = recv(self, peer, 0, nbytes, false);
        expect_is(received, peer, i);
        if (self.rank == 1) send(self, peer, 0, i, nbytes, false);
      }
    }
  });
}

TEST(messages, a_list_is_one_message_however_it_is_cut) {
  run_world(2, small_slots(), [](Rank& self) {
    for (const std::size_t scale : {1, 100}) {
      const std::size_t total = 90 * scale;
      std::vector<std::int32_t> values(total);
      std::vector<std::size_t> cut = self.rank == 0 ? std::vector<std::size_t>{0, 3 * scale, 0, 80 * scale, 7 * scale}
                                                    : std::vector<std::size_t>{41 * scale, 0, 49 * scale, 0};
      if (self.rank == 0) std::iota(values.begin(), values.end(), 5);
      std::vector<Buffer> list;
      std::size_t at = 0;
      for (const std::size_t count : cut) list.push_back({values.data() + at, count}), at += count;
      EXPECT_EQ(at, total);
      if (self.rank == 0) {
        std::vector<ConstBuffer> in;
        for (const Buffer& buffer : list) in.push_back({buffer.data, buffer.count});
        self.comm->send(in, DType::int32, 1, 0, kBlocking);
      } else {
        self.comm->recv(list, DType::int32, 0, 0, kBlocking);
        for (std::size_t i = 0; i < total; ++i) EXPECT_EQ(values[i], static_cast<std::int32_t>(i) + 5);
      }
    }
    const Call empty("nothing", false);
    if (self.rank == 0)
      self.comm->send({}, DType::float32, 1, 9, empty);
    else
      self.comm->recv({}, DType::float32, 0, 9, empty);
  });
}

TEST(messages, tags_in_another_order) {
  run_world(2, small_slots(), [](Rank& self) {
    const std::size_t sizes[] = {70000, 10, 50000, 4096, 0};
    std::vector<Message> all;
    if (self.rank == 0) {
      for (int tag = 0; tag < 5; ++tag) all.push_back(send(self, 1, tag, tag, sizes[tag]));
    } else {
      for (int tag = 4; tag >= 0; --tag) {
        Message received = recv(self, 0, tag, sizes[tag], false);
        expect_is(received, 0, tag);
      }
    }
    for (Message& one : all) one.work.wait();
  });
}

TEST(messages, one_tag_stands_behind_more_than_the_ring_holds) {
  run_world(2, small_slots(), [](Rank& self) {
    constexpr int kMany = 150;
    const auto size_of_message = [](int i) { return static_cast<std::size_t>(i % 3 == 0 ? 9000 : i); };
    if (self.rank == 0) {
      std::vector<Message> all;
      for (int i = 0; i < kMany; ++i) all.push_back(send(self, 1, 1, i, size_of_message(i)));
      all.push_back(send(self, 1, 2, kMany, 30000));
      for (Message& one : all) one.work.wait();
    } else {
      Message last = recv(self, 0, 2, 30000, false);
      expect_is(last, 0, kMany);
      for (int i = 0; i < kMany; ++i) {
        Message received = recv(self, 0, 1, size_of_message(i), i % 2 == 0);
        expect_is(received, 0, i);
      }
    }
  });
}

TEST(messages, a_receiver_that_asks_for_nothing_holds_its_sender_up) {
  std::atomic<bool> asked{false};
  run_world(2, small_slots(), [&](Rank& self) {
    constexpr int kMany = 100;  // more small messages than there are envelopes
    if (self.rank == 0) {
      for (int i = 0; i < kMany; ++i) send(self, 1, 0, i, 64, false);
      EXPECT_TRUE(asked);
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      asked = true;
      for (int i = 0; i < kMany; ++i) {
        Message received = recv(self, 0, 0, 64, false);
        expect_is(received, 0, i);
      }
    }
  });
}

TEST(messages, from_any_rank) {
  run_worlds(2, 5, [](Rank& self) {
    for (const std::size_t nbytes : {16u, 40000u}) {
      const int tag = nbytes > 100 ? 4 : 5;
      if (self.rank != 0) {
        send(self, 0, tag, self.rank, nbytes, false);
        send(self, 0, tag, self.rank + 100, nbytes, false);
        continue;
      }
      std::vector<int> seen(static_cast<std::size_t>(self.world), 0);
      for (int i = 0; i < 2 * (self.world - 1); ++i) {
        int source = -1;
        Message received = recv(self, -1, tag, nbytes, i % 2 == 0, &source);
        received.work.wait();
        const int nth = seen.at(static_cast<std::size_t>(source))++;
        expect_is(received, source, source + 100 * nth);
      }
      for (int r = 1; r < self.world; ++r) EXPECT_EQ(seen[static_cast<std::size_t>(r)], 2);
    }
  });
}

TEST(messages, from_any_rank_beside_from_one) {
  run_world(3, small_slots(), [](Rank& self) {
    if (self.rank == 2) {
      send(self, 0, 0, 1, 8, false);
      send(self, 0, 0, 2, 8, false);
      return;
    }
    if (self.rank == 1) return;
    int source = -1;
    Message one = recv(self, 2, 0, 8), any = recv(self, -1, 0, 8, true, &source);  // in call order: 1, then 2
    expect_is(any, 2, 2);
    expect_is(one, 2, 1);
    EXPECT_EQ(source, 2);
  });
}

TEST(messages, all_send_first_and_receive_then) {
  run_worlds(2, 5, [](Rank& self) {
    constexpr std::size_t kLarge = 300001;
    const int next = (self.rank + 1) % self.world, previous = (self.rank + self.world - 1) % self.world;
    Message sent = send(self, next, 0, 1, kLarge);
    Message received = recv(self, previous, 0, kLarge, false);
    expect_is(received, previous, 1);
    sent.work.wait();
    Message early = recv(self, next, 1, kLarge);  // the other way round, and both in the background
    sent = send(self, previous, 1, 2, kLarge);
    expect_is(early, next, 2);
    sent.work.wait();
  });
}

TEST(messages, many_in_flight) {
  run_worlds(2, 4, [](Rank& self) {
    constexpr int kEach = 40;
    const auto nbytes_of = [](int i) { return static_cast<std::size_t>(i % 4 == 0 ? 20000 + i : i * 5); };
    std::vector<Message> sent, received;
    std::vector<std::pair<int, int>> wanted;  // peer, number
    for (int peer = 0; peer < self.world; ++peer)
      for (int i = 0; i < kEach && peer != self.rank; ++i) wanted.emplace_back(peer, i);
    std::shuffle(wanted.begin(), wanted.end(), std::mt19937(static_cast<unsigned>(self.rank)));
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      sent.push_back(send(self, wanted[i].first, wanted[i].second, wanted[i].second, nbytes_of(wanted[i].second)));
      const auto [peer, number] = wanted[wanted.size() - 1 - i];
      received.push_back(recv(self, peer, number, nbytes_of(number)));
    }
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const auto [peer, number] = wanted[wanted.size() - 1 - i];
      expect_is(received[i], peer, number);
    }
    for (Message& one : sent) one.work.wait();
  });
}

TEST(messages, several_threads_with_their_own_tags) {
  run_world(2, small_slots(), [](Rank& self) {
    std::vector<std::thread> threads;
    for (int tag = 0; tag < 4; ++tag) {
      threads.emplace_back([&self, tag] {
        const int peer = 1 - self.rank;
        for (int i = 0; i < 25; ++i) {
          const std::size_t nbytes = i % 5 == 0 ? 30000 : 100;
          if ((self.rank + tag) % 2 == 0) send(self, peer, tag, i, nbytes, false);
          Message received = recv(self, peer, tag, nbytes, i % 2 == 0);
          expect_is(received, peer, i);
          if ((self.rank + tag) % 2 == 1) send(self, peer, tag, i, nbytes, i % 3 == 0);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST(messages, beside_collectives) {
  run_worlds(2, 3, [](Rank& self) {
    std::thread collectives([&] {
      std::vector<float> values(5000, 1.0f);
      const Buffer buffer{values.data(), values.size()};
      for (int i = 0; i < 40; ++i) self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::avg).wait();
      EXPECT_TRUE(values == std::vector<float>(5000, 1.0f));
    });
    const int next = (self.rank + 1) % self.world, previous = (self.rank + self.world - 1) % self.world;
    for (int i = 0; i < 40; ++i) {
      Message sent = send(self, next, 0, i, 15000);
      Message received = recv(self, previous, 0, 15000, false);
      expect_is(received, previous, i);
    }
    collectives.join();
  });
}

TEST(messages, a_duplicate_has_messages_of_its_own) {
  run_world(2, small_slots(), [](Rank& self) {
    Rank second{self.rank, self.world, self.mesh, self.comm->duplicate()};
    const int peer = 1 - self.rank;
    Message here = send(self, peer, 0, 1, 10), there = send(second, peer, 0, 2, 10);
    Message from_there = recv(second, peer, 0, 10), from_here = recv(self, peer, 0, 10);
    expect_is(from_there, peer, 2);
    expect_is(from_here, peer, 1);
  });
}
