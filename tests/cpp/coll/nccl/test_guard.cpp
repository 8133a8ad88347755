// Backend nccl compares calls behind them: calls that differ, late ranks and calls that never end are named, before
// the next update of a program that calls verify(behind), and nothing hangs.
#include <atomic>
#include <deque>
#include <future>

#include "base/notices.hpp"
#include "coll/cuda/call_log.hpp"
#include "coll/support/error_checks.hpp"
#include "coll/support/nccl_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr double kNever_s = 1000;  // between rounds: only verify() makes them

/// Runs `steps` of two sums and an update each; on rank 1 the sums of step `swapped` have changed places. Returns the
/// number of updates, and the text of the mismatch.
std::pair<int, std::string> train(NcclRank& self, int steps, int swapped) {
  std::deque<std::vector<float>> values;
  std::vector<Work> works;
  for (int step = 1; step <= steps; ++step) {
    const bool swaps = self.rank == 1 && step == swapped;
    for (const char* name : {swaps ? "b" : "a", swaps ? "a" : "b"})
      works.push_back(sum(self, values.emplace_back(10, 1), name));
    try {
      self.comm->verify(true);
    } catch (const CollectiveMismatch& error) {
      return {step - 1, error.what()};
    }
  }
  return {steps, ""};
}

}  // namespace

TEST(nccl_guard, digests_of_calls) {
  const auto add = [](coll::CallLog& log, std::uint64_t identity, std::uint64_t balance = 0) {
    coll::Operation operation;
    operation.signature.kind = balance != 0 ? coll::OpKind::all_to_all : coll::OpKind::all_reduce;
    operation.signature.identity = identity;
    operation.signature.counts[0] = balance;
    log.add(operation);
    return log[log.count()].digest;
  };
  coll::CallLog a, b, c;
  const coll::CallDigest same[] = {add(a, 1), add(b, 1)};
  EXPECT_TRUE(coll::same_calls(same));
  add(a, 2), add(b, 3);
  const coll::CallDigest swapped[] = {add(a, 3), add(b, 2)};
  EXPECT_FALSE(coll::same_calls(swapped));
  EXPECT_EQ(a[3].signature.sequence, 3u);

  const std::uint64_t five = 55, seven = 77;
  const coll::CallDigest first[] = {add(c, 9, five)};
  EXPECT_FALSE(coll::same_calls(first));
  coll::CallLog sender, receiver;  // sends 5, then 7; expects 7, then 5
  const coll::CallDigest wrong[] = {add(sender, 9, five), add(receiver, 9, 0 - seven)};
  EXPECT_FALSE(coll::same_calls(wrong));
  const coll::CallDigest both[] = {add(sender, 9, seven), add(receiver, 9, 0 - five)};
  EXPECT_FALSE(coll::same_calls(both));
  coll::CallLog good, match;
  add(good, 9, five), add(match, 9, 0 - five);
  const coll::CallDigest right[] = {add(good, 9, seven), add(match, 9, 0 - seven)};
  EXPECT_TRUE(coll::same_calls(right));
  for (std::uint64_t i = 0; i < 3000; ++i) add(good, i);
  EXPECT_EQ(good[3002].signature.identity, 2999u);
}

/// Their kernels end well, with wrong sums.
TEST(nccl_guard, calls_that_changed_places_are_named_before_the_next_update) {
  for (const int swapped : {1, 2, 5}) {
    FakeNccl fake;
    run_nccl_world(3, {.round_s = kNever_s}, [&](NcclRank& self) {
      const auto [updates, words] = train(self, 8, swapped);
      EXPECT_LE(updates, swapped);
      expect_contains(words, {"as number " + std::to_string(2 * swapped - 1), "rank 0, 2: all_reduce", "'a'",
                              "rank 1: all_reduce", "'b'"});
      expect_aborted(fake, self);
    });
  }
}

TEST(nccl_guard, steps_without_mismatch_do_not_wait_for_a_rank_in_the_same_step) {
  FakeNccl fake;
  std::promise<void> done;
  run_nccl_world(2, {.round_s = kNever_s}, [&](NcclRank& self) {
    std::vector<float> values(10, 1), more(10, 1);
    const auto stream = self.device->make_stream();
    Call call;
    call.stream = handle_of(*stream);
    sum(self, values, call).wait();
    self.comm->verify(true);
    if (self.rank == 1) done.get_future().wait();
    sum(self, more, call).wait();
    self.comm->verify(true);
    if (self.rank == 0) done.set_value();
    stream->synchronize();
    self.comm->verify(false);
    EXPECT_EQ(values[0], 2.0f);
    EXPECT_EQ(more[0], 2.0f);
  });
}

TEST(nccl_guard, results_before_the_difference_are_valid) {
  FakeNccl fake;
  fake.let_calls_differ();
  run_nccl_world(2, {}, [&](NcclRank& self) {
    std::vector<float> good(10, 1), bad(10, 1), behind(10, 1);
    const auto stream = self.device->make_stream();
    Call call("good");
    call.stream = handle_of(*stream);
    Work first = sum(self, good, call);
    while (!first.done()) std::this_thread::yield();
    Work second = sum(self, bad, self.rank == 0 ? "left" : "right"), third = sum(self, behind);
    EXPECT_THROW(self.comm->verify(false), CollectiveMismatch);
    first.wait();
    stream->synchronize();
    EXPECT_EQ(good[9], 2.0f);
    EXPECT_THROW_WITH(second.wait(), CollectiveMismatch, "'left'");
    EXPECT_THROW_WITH(third.wait(), CollectiveMismatch, "'left'");
    expect_aborted(fake, self);
  });
}

TEST(nccl_guard, a_rank_that_is_late_is_named_on_all_ranks) {
  FakeNccl fake;
  std::atomic<int> told{0};
  run_nccl_world(3, {.timeout_s = 0.2}, [&](NcclRank& self) {
    std::vector<float> values(10, 1);
    sum(self, values, "first").wait();
    std::string words;
    if (self.rank == 1) {
      while (told < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const auto verify_till_told = [&] {
        for (int i = 0; i < 1000; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(2)))
          self.comm->verify(false);
      };
      words = message_of<Timeout>(verify_till_told, "late rank");
    } else {
      words = message_of<Timeout>([&] { sum(self, values, "second").wait(); }, "other ranks");
      ++told;
    }
    expect_contains(words, {"all_reduce float32 sum count=10 'second' (operation 2)", "waited 0.2 s for rank 1 to call",
                            "rank 1 last called operation 1, all_reduce float32 sum count=10 'first'"});
    expect_aborted(fake, self);
  });
}

TEST(nccl_guard, a_stream_that_does_not_come_so_far_is_named) {
  FakeNccl fake;
  std::promise<void> told;
  run_nccl_world(2, {.timeout_s = 0.2}, [&](NcclRank& self) {
    std::vector<float> values(10, 1);
    const auto stream = self.device->make_stream();
    Call call("grads");
    call.stream = handle_of(*stream);
    if (self.rank == 1) put(*stream, [open = told.get_future().share()] { open.wait(); });
    Work work = sum(self, values, call);
    expect_contains(message_of<Timeout>(
                        [&] { self.comm->verify(false), self.comm->verify(false), sum(self, values).wait(); }, "gate"),
                    {"'grads'", "for rank 1: all ranks have called it, but work before it"});
    if (self.rank == 0) told.set_value();
    EXPECT_THROW(work.wait(), Timeout);
    stream->synchronize();
    expect_aborted(fake, self);
  });
}

TEST(nccl_guard, the_host_is_ahead_by_32_calls) {
  FakeNccl fake;
  std::promise<void> opened;
  run_nccl_world(1, {}, [&](NcclRank& self) {
    std::vector<float> values(10, 1);
    const auto stream = self.device->make_stream();
    Call call;
    call.stream = handle_of(*stream);
    put(*stream, [open = opened.get_future().share()] { open.wait(); });
    std::vector<Work> works;
    for (int i = 0; i < 33; ++i) works.push_back(sum(self, values, call));
    EXPECT_TRUE(works[31].wait_for(10));
    EXPECT_FALSE(works[0].done());
    EXPECT_FALSE(works[32].wait_for(0.02));
    opened.set_value();
    for (Work& work : works) work.wait();
    stream->synchronize();
  });
}

/// Calls that need no other rank: one that makes none is still noticed.
TEST(nccl_guard, a_rank_is_ahead_by_a_ring_of_calls_at_most) {
  FakeNccl fake;
  std::promise<void> told;
  run_nccl_world(2, {.timeout_s = 0.5}, [&](NcclRank& self) {
    const auto call_alone = [&] {
      std::vector<ConstBuffer> in(2, {nullptr, 0});
      std::vector<Buffer> out(2, {nullptr, 0});
      self.comm->all_to_all(in, out, DType::float32, kBlocking);
    };
    for (int i = 0; i < 3000; ++i) call_alone();
    if (self.rank == 1) return told.get_future().wait();
    const std::string words = message_of<Timeout>(
        [&] {
          for (int i = 0; i < 2000; ++i) call_alone();
        },
        "ahead");
    expect_contains(words, {"for rank 1 to call", "rank 1 last called operation 3000"});
    told.set_value();
  });
}

TEST(nccl_guard, the_last_calls_are_compared_when_it_is_closed) {
  take_notices();
  FakeNccl fake;
  run_nccl_world(2, {}, [&](NcclRank& self) {
    std::vector<float> values(10, 1);
    sum(self, values, self.rank == 0 ? "x" : "y").wait();
    self.comm->close();
  });
  std::string all;
  for (const std::string& line : take_notices()) all += line;
  expect_contains(all, {"when the communicator was closed", "'x'", "'y'"});
}
