// A rank that is late but alive: one notice names it, the operation continues when it arrives, and ends at the limit.
#include <atomic>
#include <chrono>

#include "base/notices.hpp"
#include "coll/support/tcp_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

// A thread that the kernel has not run for this long is no late rank.
constexpr double kWarn_s = kSanitized ? 0.1 : 0.04, kTimeout_s = 5 * kWarn_s, kLimit_s = 30;
const CommOptions kPatient{.timeout_s = kTimeout_s, .limit_s = kLimit_s, .warn_s = kWarn_s};
const TcpWorld kPatientTcp{.options = {.timeout_s = kTimeout_s, .limit_s = kLimit_s, .warn_s = kWarn_s}};

using Body = std::function<void(Rank&)>;

void run_shm(int world, const Body& body) { run_world(world, kPatient, body); }
void run_tcp(int world, const Body& body) { run_link_world(world, kPatientTcp, body); }

/// Waits for the next notice, longer than any deadline that could end the operation in question.
std::string next_notice() {
  for (int tries = 0; tries < 5000; ++tries) {
    if (has_notices()) {
      const auto lines = take_notices();
      for (std::size_t i = 1; i < lines.size(); ++i) fail(__FILE__, __LINE__, "one notice too many: " + lines[i]);
      return lines.front();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return "no notice";
}

void sleep_past_the_timeout() { std::this_thread::sleep_for(std::chrono::duration<double>(3 * kTimeout_s)); }

bool contains(const std::string& line, const std::string& part) {
  if (line.find(part) != std::string::npos) return true;
  fail(__FILE__, __LINE__, "\"" + line + "\" has no \"" + part + "\"");
  return false;
}

void sum(Rank& self) {
  std::vector<float> values(100, 1.0f + static_cast<float>(self.rank));
  const Buffer all{values.data(), values.size()};
  self.comm->all_reduce({&all, 1}, DType::float32, ReduceOp::sum, kBlocking);
  EXPECT_EQ(values.back(), 6.0f);
}

void recv(Rank& self, int src) {
  float value = 0;
  const Buffer one{&value, 1};
  self.comm->recv({&one, 1}, DType::float32, src, 5, kBlocking);
  EXPECT_EQ(value, 7.0f);
}

void send(Rank& self, int dst) {
  const float value = 7;
  const ConstBuffer one{&value, 1};
  self.comm->send({&one, 1}, DType::float32, dst, 5, kBlocking);
}

/// Rank 2 comes long after the timeout; each notice is posted once, by one rank.
void check_collective(void (*run)(int, const Body&)) {
  take_notices();
  run(3, [](Rank& self) {
    if (self.rank == 2) {
      const std::string late = next_notice();
      EXPECT_TRUE(contains(late, "all_reduce") && contains(late, "has waited") && contains(late, "rank 2"));
      sleep_past_the_timeout();
      EXPECT_FALSE(has_notices());
    }
    sum(self);
  });
  const std::string came = next_notice();
  EXPECT_TRUE(contains(came, "all_reduce") && contains(came, "rank 2 came after"));
}

/// A receiver that names its sender, and a receiver from any rank.
void check_message(void (*run)(int, const Body&), const char* waits) {
  for (const int src : {1, -1}) {
    take_notices();
    run(2, [&](Rank& self) {
      if (self.rank == 0) return recv(self, src);
      const std::string late = next_notice();
      EXPECT_TRUE(contains(late, "recv") && contains(late, "has waited") && contains(late, waits));
      sleep_past_the_timeout();
      send(self, 0);
    });
    take_notices();  // the notice of its arrival
  }
}

}  // namespace

TEST(late_ranks, of_a_collective_are_named_and_waited_for) { check_collective(run_shm); }
TEST(late_ranks, of_a_collective_over_tcp_are_named_and_waited_for) { check_collective(run_tcp); }
TEST(late_ranks, of_a_message_are_named_and_waited_for) { check_message(run_shm, "to send it"); }
TEST(late_ranks, of_a_message_over_tcp_are_named_and_waited_for) { check_message(run_tcp, "has found no counterpart"); }

TEST(late_ranks, end_an_operation_at_the_limit_though_they_live) {
  CommOptions options = kPatient;
  options.limit_s = 3 * kTimeout_s;
  std::atomic<bool> has_ended{false};
  run_world(2, options, [&](Rank& self) {
    if (self.rank == 0) {
      EXPECT_THROW_WITH(recv(self, 1), Timeout, "rank 0 waited");
      EXPECT_THROW_WITH(sum(self), Timeout, "rank 1");
      has_ended = true;
    }
    while (!has_ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  take_notices();
}

TEST(late_ranks, of_a_message_over_tcp_are_named_with_their_last_collective) {
  take_notices();
  run_link_world(3, kPatientTcp, [](Rank& self) {
    sum(self);
    if (self.rank == 0) recv(self, 1);
    if (self.rank == 1) {
      EXPECT_TRUE(contains(next_notice(), "last entered operation 1, all_reduce"));
      send(self, 0);
    }
  });
  take_notices();
}
