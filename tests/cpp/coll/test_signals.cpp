// Signal handlers inside of a call that waits: they close the communicator, call it again, or raise.
#include <atomic>
#include <chrono>

#include "base/interrupt.hpp"
#include "coll/support/error_checks.hpp"
#include "coll/support/tcp_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

/// Run on this thread when it next looks for signals, once.
thread_local std::function<void()> handler;

struct Handlers {
  Handlers() {
    set_interrupt_check([] {
      if (handler) std::exchange(handler, nullptr)();
    });
  }
  ~Handlers() { set_interrupt_check(nullptr); }
};

/// Set by one rank, waited for by another.
class Flag {
 public:
  void set() {
    is_set_ = true;
    is_set_.notify_all();
  }
  void wait() const { is_set_.wait(false); }

 private:
  std::atomic<bool> is_set_{false};
};

using Body = std::function<void(Rank&)>;

/// Over shared memory, then over sockets.
void run_both(int world, const Body& body) {
  const Handlers handlers;
  run_world(world, small_slots(), body);
  run_link_world(world, {}, body);
}

/// The same, with a flag: rank 1 continues once rank 0 has set it.
void run_both(int world, const std::function<void(Rank&, Flag&)>& body) {
  for (const bool links : {false, true}) {
    const Handlers handlers;
    Flag left;
    const Body with_flag = [&](Rank& self) { body(self, left); };
    links ? run_link_world(world, {}, with_flag) : run_world(world, small_slots(), with_flag);
  }
}

void recv_one(Communicator& comm, int src) {
  float value = 0;
  const Buffer buffer{&value, 1};
  comm.recv({&buffer, 1}, DType::float32, src, 0, kBlocking);
}

void leave(Rank& self) {
  self.comm->close();
  self.mesh->leave();
}

constexpr const char* kSaid = "a signal's handler closed";

}  // namespace

TEST(comm_signals, a_handler_closes_within_a_collective) {
  run_both(2, [](Rank& self, Flag& left) {
    if (self.rank == 0) {
      handler = [&] { leave(self); };
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), Error, kSaid);
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), Error, "closed");
      EXPECT_EQ(self.comm->memory().slot_nbytes, 0u);
      left.set();
    } else {
      left.wait();
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), PeerLost, "rank 0 left");
    }
  });
}

TEST(comm_signals, a_handler_closes_within_a_message) {
  run_both(2, [](Rank& self) {
    if (self.rank == 0) {
      handler = [&] { leave(self); };
      EXPECT_THROW_WITH(recv_one(*self.comm, 1), Error, kSaid);
      EXPECT_EQ(self.comm->memory().slot_nbytes, 0u);
    } else {
      EXPECT_THROW_WITH(recv_one(*self.comm, 0), PeerLost, "rank 0 left");
    }
  });
}

TEST(comm_signals, a_handler_closes_within_a_call_that_is_queued) {
  run_both(2, [](Rank& self, Flag& left) {
    if (self.rank == 0) {
      Work first = self.comm->barrier("first");
      handler = [&] { leave(self); };
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), Error, kSaid);
      EXPECT_THROW_WITH(first.wait(), Error, "closed");
      left.set();
    } else {
      left.wait();
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), PeerLost, "rank 0 left");
    }
  });
}

TEST(comm_signals, a_handler_ends_what_other_threads_have_queued) {
  run_both(2, [](Rank& self, Flag& left) {
    if (self.rank == 0) {
      std::atomic<bool> inside{false};
      std::atomic<bool> is_queued{false};
      Work queued;  // outlives both threads
      std::thread other([&] {
        inside.wait(false);
        queued = self.comm->barrier("queued");
        is_queued = true;
        is_queued.notify_all();
        EXPECT_THROW_WITH(queued.wait(), Error, "closed");
      });
      handler = [&] {
        inside = true;
        inside.notify_all();
        is_queued.wait(false);
        leave(self);
        EXPECT_TRUE(queued.done());
      };
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), Error, kSaid);
      other.join();
      left.set();
    } else {
      left.wait();
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), PeerLost, "rank 0 left");
    }
  });
}

TEST(comm_signals, a_handler_leaves_within_an_allocation) {
  const Handlers handlers;
  std::atomic<bool> over{false};
  run_world(2, small_slots(), [&](Rank& self) {
    if (self.rank == 0) {
      handler = [&] { leave(self); };
      EXPECT_THROW_WITH(self.comm->allocate(100), Error, kSaid);
      over = true;
      over.notify_all();
    } else {
      over.wait(false);  // enters nothing: rank 0 waits for it
    }
  });
  run_world(2, small_slots(), [&](Rank& self) {
    if (self.rank != 0) return;
    handler = [&] { self.mesh->leave(); };
    EXPECT_THROW(self.mesh->exchange({}, 20), Error);
  });
}

TEST(comm_signals, a_handler_and_another_thread_close_at_once) {
  const Handlers handlers;
  for (int round = 0; round < 20; ++round) {
    run_world(2, small_slots(), [](Rank& self) {
      if (self.rank != 0) return;
      std::atomic<bool> go{false};
      std::thread other([&] {
        go.wait(false);
        leave(self);
      });
      handler = [&] {
        go = true;
        go.notify_all();
        leave(self);
      };
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), Error, "closed");
      other.join();
    });
  }
}

TEST(comm_signals, a_handler_cannot_start_an_operation_within_one) {
  run_both(2, [](Rank& self, Flag& left) {
    if (self.rank == 0) {
      handler = [&] {
        EXPECT_THROW_WITH(self.comm->barrier(kBlocking), Error, "in the middle of another call");
        EXPECT_THROW_WITH(self.comm->barrier("async"), Error, "in the middle of another call");
        left.set();
      };
    } else {
      left.wait();
    }
    self.comm->barrier(kBlocking);
    self.comm->barrier(kBlocking);
  });
}

TEST(comm_signals, an_interrupted_call_that_is_queued_ends_at_once) {
  run_both(2, [](Rank& self, Flag& left) {
    self.comm->barrier(kBlocking);
    if (self.rank == 0) {
      Work first = self.comm->barrier("first");
      handler = [] { throw Interrupted(); };
      EXPECT_THROW(self.comm->barrier(kBlocking), Interrupted);
      EXPECT_TRUE(first.done());
      EXPECT_THROW_WITH(first.wait(), Error, "interrupted by a signal");
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), Error, "unusable since");
      leave(self);
      left.set();
    } else {
      left.wait();
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), PeerLost, "rank 0 left");
    }
  });
}

TEST(comm_signals, others_lose_a_rank_that_was_interrupted) {
  run_both(2, [](Rank& self, Flag& left) {
    if (self.rank == 0) {
      handler = [] { throw Interrupted(); };
      EXPECT_THROW(self.comm->barrier(kBlocking), Interrupted);
      leave(self);
      left.set();
    } else {
      left.wait();
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), PeerLost, "rank 0 left");
    }
  });
}

TEST(comm_signals, a_full_queue_can_be_interrupted) {
  std::atomic<int> over{0};
  run_both(2, [&](Rank& self) {
    if (self.rank == 0) over = 0;
    self.comm->barrier(kBlocking);
    if (self.rank == 0) {
      std::vector<Work> works;
      const auto fill = [&] {
        for (;;) works.push_back(self.comm->barrier("one of many"));
      };
      handler = [] { throw Interrupted(); };
      EXPECT_THROW(fill(), Interrupted);
      handler = [&] { leave(self); };
      EXPECT_THROW_WITH(fill(), Error, "closed");
      over = 1;
      over.notify_all();
    } else {
      over.wait(0);
    }
  });
}

TEST(comm_signals, work_can_be_given_up) {
  run_both(2, [](Rank& self, Flag& left) {
    if (self.rank == 0) {
      Work work = self.comm->barrier("given up");
      work.give_up();
      EXPECT_THROW_WITH(work.wait(), Error, "given up");
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), Error, "given up");
      leave(self);
      left.set();
    } else {
      left.wait();
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), PeerLost, "rank 0 left");
    }
  });
  std::atomic<int> over{0};
  run_both(2, [&](Rank& self) {
    std::vector<float> data(100000, 1.0f);
    const Buffer buffer{data.data(), data.size()};
    if (self.rank == 0) over = 0;
    self.comm->barrier(kBlocking);
    if (self.rank == 0) {
      Work work = self.comm->recv({&buffer, 1}, DType::float32, 1, 7);
      work.give_up();
      EXPECT_THROW_WITH(work.wait(), Error, "given up");
      over = 1;
      over.notify_all();
    } else {
      over.wait(0);
    }
    self.comm->barrier(kBlocking);  // which only that message concerned
  });
}

TEST(comm_signals, memory_beside_close) {
  const Handlers handlers;
  for (int round = 0; round < 5; ++round) {
    run_world(2, small_slots(), [](Rank& self) {
      if (self.rank != 0) return;
      // As Python's interpreter lock: the handler needs it, and memory() is called with it held.
      std::mutex interpreter;
      std::atomic<bool> stop{false};
      std::thread asks([&] {
        while (!stop) {
          const std::lock_guard lock(interpreter);
          self.comm->memory();
          std::this_thread::yield();
        }
      });
      std::thread closes([&] { self.comm->close(); });
      handler = [&] { const std::lock_guard lock(interpreter); };
      EXPECT_THROW_WITH(self.comm->barrier(kBlocking), Error, "closed");
      closes.join();
      stop = true;
      asks.join();
    });
  }
}

TEST(comm_signals, the_deadline_is_suspended_beside_close) {
  for (int round = 0; round < 50; ++round) {
    run_world(1, small_slots(), [](Rank& self) {
      std::thread closes([&] { self.comm->close(); });
      try {
        for (;;) {
          self.comm->suspend_deadline();
          self.comm->resume_deadline();
        }
      } catch (const Error& error) {
        expect_contains(error.what(), {"closed"});
      }
      closes.join();
    });
  }
}
