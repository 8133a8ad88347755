// send and recv that fail: the type, both sides, the operations that still work; never a hang.
#include <atomic>
#include <chrono>

#include "base/interrupt.hpp"
#include "coll/support/error_checks.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr std::size_t kSmall = 10, kLarge = 40000;  // a small message is sent before it is asked for

struct Floats {
  std::vector<float> values;
  explicit Floats(std::size_t count, float value = 0) : values(count, value) {}
  Buffer out() { return {values.data(), values.size()}; }
  ConstBuffer in() const { return {values.data(), values.size()}; }
};

void send(Communicator& comm, const Floats& data, int dst, int tag, const char* site = "",
          DType dtype = DType::float32) {
  const ConstBuffer buffer = data.in();
  comm.send({&buffer, 1}, dtype, dst, tag, {"", false, site});
}
void recv(Communicator& comm, Floats& data, int src, int tag, const char* site = "", DType dtype = DType::float32) {
  const Buffer buffer = data.out();
  comm.recv({&buffer, 1}, dtype, src, tag, {"", false, site});
}

/// Two ranks still understand each other, by messages and by collectives.
void expect_all_well(Rank& self, int peer) {
  for (const std::size_t count : {kSmall, kLarge}) {
    Floats mine(count, static_cast<float>(self.rank)), theirs(count);
    const ConstBuffer buffer = mine.in();
    Work sent = self.comm->send({&buffer, 1}, DType::float32, peer, 99);
    recv(*self.comm, theirs, peer, 99);
    sent.wait();
    EXPECT_TRUE(theirs.values == std::vector<float>(count, static_cast<float>(peer)));
  }
  self.comm->barrier().wait();
}

/// Lets ranks wait for each other without the tested code.
struct Meeting {
  std::atomic<int> there{0};
  void wait(int ranks) {
    ++there;
    while (there < ranks) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
};

}  // namespace

TEST(messages_errors, arguments) {
  run_world(2, small_slots(), [](Rank& self) {
    Floats data(4);
    const Buffer null{nullptr, 3};
    EXPECT_THROW_WITH(send(*self.comm, data, 2, 0), InvalidArgument, "dst=2");
    EXPECT_THROW_WITH(send(*self.comm, data, self.rank, 0), InvalidArgument, "another rank");
    EXPECT_THROW_WITH(send(*self.comm, data, 1 - self.rank, -1), InvalidArgument, "tag=-1");
    EXPECT_THROW_WITH(recv(*self.comm, data, -2, 0), InvalidArgument, "src=-2");
    EXPECT_THROW_WITH(self.comm->recv({&null, 1}, DType::float32, -1, 0), InvalidArgument, "null");
    expect_all_well(self, 1 - self.rank);
  });
}

TEST(messages_errors, a_large_mismatch_is_told_to_both) {
  for (const bool dtype_differs : {false, true}) {
    run_world(2, small_slots(), [&](Rank& self) {
      Floats data(kLarge), other(kLarge + (dtype_differs ? 0 : 1));
      const auto call = [&] {
        if (self.rank == 0)
          send(*self.comm, data, 1, 7, "a.py:1");
        else
          recv(*self.comm, other, 0, 7, "b.py:2", dtype_differs ? DType::int32 : DType::float32);
      };
      expect_contains(message_of<CollectiveMismatch>(call, "mismatch"),
                      {"rank 0: send float32 count=40000 tag=7 to rank 1 at a.py:1",
                       dtype_differs ? "rank 1: recv int32 count=40000 tag=7 from rank 0 at b.py:2"
                                     : "rank 1: recv float32 count=40001 tag=7 from rank 0 at b.py:2"});
      expect_all_well(self, 1 - self.rank);
    });
  }
}

TEST(messages_errors, elements_of_another_name_are_a_mismatch) {
  for (const std::size_t count : {kSmall, kLarge}) {
    run_world(2, small_slots(), [&](Rank& self) {
      Floats data(count);
      const ConstBuffer in = data.in();
      const Buffer out = data.out();
      Call call;
      call.element = self.rank == 0 ? "int16" : "uint16";
      const auto exchange = [&] {
        if (self.rank == 1) return self.comm->recv({&out, 1}, DType::float32, 0, 7, call).wait();
        self.comm->send({&in, 1}, DType::float32, 1, 7, call).wait();
        self.comm->recv({&out, 1}, DType::float32, 1, 8, call).wait();  // raises a small message's mismatch
      };
      expect_contains(message_of<CollectiveMismatch>(exchange, "mismatch"),
                      {"send float32 (int16) count=", "recv float32 (uint16) count="});
      expect_all_well(self, 1 - self.rank);
    });
  }
}

TEST(messages_errors, the_sender_of_a_small_mismatch_learns_it_from_its_next_call) {
  for (const bool waits_already : {true, false}) {
    Meeting meeting;
    run_world(2, small_slots(), [&](Rank& self) {
      Floats data(kSmall), other(kSmall + 1);
      const std::initializer_list<std::string> parts = {"rank 0: send float32 count=10 tag=1 to rank 1 at a.py:1",
                                                        "rank 1: recv float32 count=11 tag=1 from rank 0"};
      if (self.rank == 0) {
        send(*self.comm, data, 1, 1, "a.py:1");
        if (!waits_already) meeting.wait(2);
        expect_contains(message_of<CollectiveMismatch>([&] { recv(*self.comm, data, 1, 2); }, "sender"), parts);
      } else {
        expect_contains(message_of<CollectiveMismatch>([&] { recv(*self.comm, other, 0, 1); }, "receiver"), parts);
        if (!waits_already) meeting.wait(2);
      }
      expect_all_well(self, 1 - self.rank);
    });
  }
}

TEST(messages_errors, a_mismatch_ends_only_its_own_message) {
  run_world(2, small_slots(), [](Rank& self) {
    Floats good(kLarge, 3), wrong(kLarge + 4);
    const ConstBuffer in = good.in();
    const Buffer out = good.out(), bad = wrong.out();
    if (self.rank == 0) {
      Work first = self.comm->send({&in, 1}, DType::float32, 1, 1),
           second = self.comm->send({&in, 1}, DType::float32, 1, 2),
           third = self.comm->send({&in, 1}, DType::float32, 1, 3);
      EXPECT_THROW(second.wait(), CollectiveMismatch);
      first.wait(), third.wait();
    } else {
      Work second = self.comm->recv({&bad, 1}, DType::float32, 0, 2);
      recv(*self.comm, good, 0, 1);
      Work third = self.comm->recv({&out, 1}, DType::float32, 0, 3);
      EXPECT_THROW(second.wait(), CollectiveMismatch);
      third.wait();
      EXPECT_TRUE(good.values == std::vector<float>(kLarge, 3));
    }
    expect_all_well(self, 1 - self.rank);
  });
}

TEST(messages_errors, who_waits_for_the_dead_is_told_and_the_others_go_on) {
  Meeting dead, over;
  run_world(4, small_slots(), [&](Rank& self) {
    Floats data(kLarge, static_cast<float>(self.rank));
    const ConstBuffer in = data.in();
    self.comm->barrier().wait();
    if (self.rank == 3) {
      self.mesh->drop_dead();
    } else if (self.rank == 2) {
      expect_contains(message_of<PeerLost>([&] { recv(*self.comm, data, 3, 5, "c.py:9"); }, "recv"),
                      {"rank 3 died", "recv float32 count=40000 tag=5 from rank 3 at c.py:9 cannot finish"});
      expect_contains(message_of<PeerLost>([&] { recv(*self.comm, data, -1, 5); }, "any"), {"rank 3 died"});
      Work sent;
      expect_contains(message_of<PeerLost>([&] { self.comm->send({&in, 1}, DType::float32, 3, 5).wait(); }, "send"),
                      {"rank 3 died", "send float32"});
    } else {
      const int peer = 1 - self.rank;
      for (int i = 0; i < 10; ++i) {
        Floats theirs(kLarge);
        Work sent = self.comm->send({&in, 1}, DType::float32, peer, 0);
        recv(*self.comm, theirs, peer, 0);
        sent.wait();
        EXPECT_TRUE(theirs.values == std::vector<float>(kLarge, static_cast<float>(peer)));
      }
    }
    over.wait(4);
  });
}

TEST(messages_errors, pending_messages_end_when_the_peer_dies) {
  Meeting started, over;
  run_world(2, small_slots(), [&](Rank& self) {
    Floats data(kLarge), small(kSmall);
    const ConstBuffer in = data.in();
    const Buffer out = small.out();
    if (self.rank == 1) {
      started.wait(2);
      self.mesh->drop_dead();
    } else {
      Work announced = self.comm->send({&in, 1}, DType::float32, 1, 0),
           posted = self.comm->recv({&out, 1}, DType::float32, 1, 0);
      started.wait(2);
      EXPECT_THROW_WITH(announced.wait(), PeerLost, "rank 1 died");
      EXPECT_THROW_WITH(posted.wait(), PeerLost, "rank 1 died");
    }
    over.wait(2);
  });
}

TEST(messages_errors, what_was_sent_before_leaving_counts) {
  Meeting closed;
  run_world(2, small_slots(), [&](Rank& self) {
    Floats data(kSmall, 4), large(kLarge);
    if (self.rank == 1) {
      send(*self.comm, data, 0, 0);
      const ConstBuffer in = large.in();
      Work unwanted = self.comm->send({&in, 1}, DType::float32, 0, 1);
      self.comm->close();
      EXPECT_THROW_WITH(unwanted.wait(), Error, "closed while send float32 count=40000 tag=1 to rank 0");
      EXPECT_THROW_WITH(send(*self.comm, data, 0, 0), Error, "closed");
      closed.wait(2);
      return;
    }
    closed.wait(2);
    data.values.assign(kSmall, 0);
    recv(*self.comm, data, 1, 0);
    EXPECT_TRUE(data.values == std::vector<float>(kSmall, 4));
    EXPECT_THROW_WITH(recv(*self.comm, large, 1, 1), PeerLost, "rank 1 left");
    EXPECT_THROW_WITH(recv(*self.comm, data, 1, 2), PeerLost, "rank 1 left");
    EXPECT_THROW_WITH(recv(*self.comm, data, -1, 2), PeerLost, "rank 1 left");
    EXPECT_THROW_WITH(send(*self.comm, data, 1, 2), PeerLost, "rank 1 left");
  });
}

TEST(messages_errors, close_ends_what_waits_in_other_threads) {
  run_world(2, small_slots(), [](Rank& self) {
    Floats a(kSmall), b(kSmall);
    const Buffer out = a.out();
    Work pending = self.comm->recv({&out, 1}, DType::float32, 1 - self.rank, 0);
    std::thread blocked([&] { EXPECT_THROW_WITH(recv(*self.comm, b, 1 - self.rank, 1), Error, ""); });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    self.comm->close();
    blocked.join();
    EXPECT_THROW(pending.wait(), Error);  // closed here, or rank 1 left
  });
}

TEST(messages_errors, a_receive_that_times_out_harms_nothing) {
  Meeting late;
  run_world(2, small_slots(0.5), [&](Rank& self) {
    Floats data(kSmall, 1);
    self.comm->barrier().wait();
    if (self.rank == 0) {
      expect_contains(message_of<Timeout>([&] { recv(*self.comm, data, 1, 5, "a.py:1"); }, "recv"),
                      {"recv float32 count=10 tag=5 from rank 1 at a.py:1", "rank 0 waited 0.5 s for rank 1 to send it",
                       "rank 1 has sent messages without a receive on this rank", "tag=6 to rank 0 at b.py:2"});
      expect_contains(message_of<Timeout>([&] { recv(*self.comm, data, -1, 5); }, "any"), {"for any rank"});
      recv(*self.comm, data, 1, 6);
      late.wait(2);
    } else {
      send(*self.comm, data, 0, 6, "b.py:2");
      late.wait(2);
    }
    expect_all_well(self, 1 - self.rank);
  });
}

TEST(messages_errors, a_deadline_counts_from_the_last_progress) {
  run_world(2, small_slots(0.5), [](Rank& self) {
    constexpr int kMany = 100;  // a good deal more than the ring holds, for longer than the deadline in all
    Floats data(kSmall, 1);
    const ConstBuffer in = data.in();
    if (self.rank == 0) {
      std::vector<Work> works;
      for (int i = 0; i < kMany; ++i) works.push_back(self.comm->send({&in, 1}, DType::float32, 1, 0));
      for (Work& work : works) work.wait();
    } else {
      for (int i = 0; i < kMany; ++i) {
        recv(*self.comm, data, 0, 0);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
  });
}

TEST(messages_errors, large_blocking_sends_to_each_other_end_at_the_deadline) {
  Meeting meeting;
  run_world(2, small_slots(0.2), [&](Rank& self) {
    Floats data(kLarge);
    const std::string peer = std::to_string(1 - self.rank), me = std::to_string(self.rank);
    const char* const sites[] = {"a.py:1", "b.py:2"};
    self.comm->barrier().wait();
    expect_contains(message_of<Timeout>([&] { send(*self.comm, data, 1 - self.rank, 3, sites[self.rank]); }, "send"),
                    {"tag=3 to rank " + peer + " at " + sites[self.rank], "waited 0.2 s for rank " + peer,
                     "send float32 count=40000 tag=3 to rank " + me + " at " + sites[1 - self.rank]});
    meeting.wait(2);
    expect_contains(message_of<Timeout>([&] { send(*self.comm, data, 1 - self.rank, 3); }, "afterwards"),
                    {"can send nothing more to rank " + peer + " since: send float32"});
    expect_contains(message_of<Timeout>([&] { recv(*self.comm, data, 1 - self.rank, 4); }, "the other way"),
                    {"can receive nothing more from rank " + peer});
    self.comm->barrier().wait();  // the collectives are unharmed
  });
}

TEST(messages_errors, no_deadline_while_one_side_is_suspended) {
  run_world(2, small_slots(0.1), [](Rank& self) {
    Floats data(kLarge, 2);
    self.comm->barrier().wait();
    if (self.rank == 0) {
      self.comm->suspend_deadline();
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      send(*self.comm, data, 1, 0);
      self.comm->resume_deadline();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));  // rank 0 has suspended by then
      recv(*self.comm, data, 0, 0);
    }
    expect_all_well(self, 1 - self.rank);
  });
}

namespace {
std::atomic<std::thread::id> to_interrupt{};
void interrupt() {
  if (to_interrupt.load() == std::this_thread::get_id()) throw Interrupted();
}
}  // namespace

TEST(messages_errors, a_blocking_call_can_be_interrupted) {
  Meeting interrupted, over;
  set_interrupt_check(interrupt);
  run_world(2, small_slots(), [&](Rank& self) {
    Floats data(kLarge);
    if (self.rank == 0) {
      to_interrupt = std::this_thread::get_id();
      EXPECT_THROW(recv(*self.comm, data, 1, 0), Interrupted);
      EXPECT_THROW(send(*self.comm, data, 1, 0), Interrupted);
      to_interrupt = std::thread::id();
      interrupted.wait(2);
      EXPECT_THROW_WITH(send(*self.comm, data, 1, 0), Error, "was interrupted");
    } else {
      // A message that was announced to it and will not come: also a typed error.
      interrupted.wait(2);
      expect_contains(message_of<Error>([&] { recv(*self.comm, data, 0, 0); }, "announced"), {"was interrupted"});
    }
    over.wait(2);
  });
  set_interrupt_check(nullptr);
}
