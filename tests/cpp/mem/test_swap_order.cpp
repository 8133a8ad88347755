// The order of operations, and their durations: reads before write-back, latencies in the statistics.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "faulty_engine.hpp"
#include "mem/latency.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr std::size_t kBlock = 65536;

/// Holds the I/O thread at its next result while closed, and writes down which requests start.
class Gate {
 public:
  void attach(FaultyEngine& engine) {
    engine.on_request = [this](mem::IoRequest& request) {
      const std::lock_guard lock(mutex_);
      order_ += request.write ? 'w' : 'r';
    };
    engine.on_result = [this](const mem::IoRequest&, std::int64_t&) {
      std::unique_lock lock(mutex_);
      held_ = !open_;
      changed_.notify_all();
      changed_.wait(lock, [this] { return open_; });
      held_ = false;
    };
  }
  void close() {
    const std::lock_guard lock(mutex_);
    open_ = false;
    order_.clear();
  }
  void wait_until_held() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return held_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  std::string order() {
    const std::lock_guard lock(mutex_);
    return order_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true, held_ = false;
  std::string order_;
};

/// The order in which blocks start: `writes` keys of `blocks` blocks are queued, then reads of `reads` others.
std::string order_of(const std::string& engine, int writes, std::size_t blocks, int reads) {
  Gate gate;
  const Setup setup({engine, true}, [&gate](FaultyEngine& each) { gate.attach(each); }, 1, 1);
  Pattern data(blocks * kBlock, 1), out(kBlock, 2);
  std::vector<Pattern> in;  // a buffer each: several reads are under way at once
  for (int i = 0; i < reads; ++i) in.emplace_back(kBlock, 3);
  for (int i = 0; i < reads; ++i) setup.file->write("r" + std::to_string(i), out.data(), kBlock).wait();
  gate.close();
  std::vector<Work> works;                                          // dropping one would wait for it
  works.push_back(setup.file->write("first", out.data(), kBlock));  // in flight when the others come
  gate.wait_until_held();
  for (int i = 0; i < writes; ++i)
    works.push_back(setup.file->write("w" + std::to_string(i), data.data(), data.nbytes()));
  for (int i = 0; i < reads; ++i)
    works.push_back(setup.file->read("r" + std::to_string(i), in[static_cast<std::size_t>(i)].data(), kBlock));
  gate.open();
  setup.file->wait();
  for (const Pattern& each : in) EXPECT_TRUE(each == out);
  return gate.order().substr(1);
}

}  // namespace

TEST(SwapOrder, reads_overtake_queued_writes) {
  for (const std::string& engine : engine_names()) {
    EXPECT_EQ(order_of(engine, 5, 1, 4), "rrrrwwwww");
    // Down to the block: a large write that has begun lets reads pass, too.
    EXPECT_EQ(order_of(engine, 1, 6, 3), "rrrwwwwww");
  }
}

TEST(SwapOrder, the_time_of_what_is_under_way_counts) {
  for (const std::string& engine : engine_names()) {
    Gate gate;
    const Setup setup({engine, true}, [&gate](FaultyEngine& each) { gate.attach(each); }, 1, 1);
    Pattern data(kBlock, 1);
    gate.close();
    const Work work = setup.file->write("k", data.data(), kBlock);
    gate.wait_until_held();
    const double before = setup.file->stats().write_s;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_GE(setup.file->stats().write_s, before + 0.002);
    EXPECT_EQ(setup.file->stats().read_s, 0.0);
    gate.open();
    setup.file->wait();
    const double after = setup.file->stats().write_s;
    EXPECT_GE(after, before + 0.002);
    EXPECT_EQ(setup.file->stats().write_s, after);
  }
}

TEST(SwapOrder, writes_go_on_under_any_number_of_reads) {
  for (const std::string& engine : engine_names()) {
    const std::string order = order_of(engine, 3, 1, 40);
    const auto longest = static_cast<std::size_t>(SwapFile::kReadsPerWrite) - 1;
    EXPECT_EQ(order.substr(0, 3 * (longest + 1)),
              std::string(longest, 'r') + "w" + std::string(longest, 'r') + "w" + std::string(longest, 'r') + "w");
    EXPECT_EQ(order.size(), 43u);
  }
}

TEST(SwapOrder, a_read_of_a_key_waits_for_its_own_write) {
  for (const std::string& engine : engine_names()) {
    const Setup setup({engine, true}, [](FaultyEngine&) {}, 1, 2);
    std::vector<Pattern> out, in;
    std::vector<Work> works;
    for (std::size_t i = 0; i < 20; ++i) {
      out.emplace_back(3 * kBlock + 77, i);
      in.emplace_back(3 * kBlock + 77, 99);
    }
    for (std::size_t i = 0; i < 20; ++i)
      works.push_back(setup.file->write("k" + std::to_string(i % 3), out[i].data(), out[i].nbytes()));
    for (std::size_t i = 17; i < 20; ++i)  // the last writes of keys 2, 0, 1
      works.push_back(setup.file->read("k" + std::to_string(i % 3), in[i].data(), in[i].nbytes()));
    setup.file->wait();
    for (std::size_t i = 17; i < 20; ++i) EXPECT_TRUE(in[i] == out[i]);
  }
}

TEST(Latency, percentiles_of_known_samples) {
  using std::chrono::microseconds;
  mem::LatencyHistogram histogram;
  EXPECT_EQ(histogram.summary().count, 0u);
  EXPECT_EQ(histogram.summary().p99_s, 0.0);
  for (int i = 1; i <= 1000; ++i) histogram.record(microseconds(i));
  const SwapFile::Latency latency = histogram.summary();
  EXPECT_EQ(latency.count, 1000u);
  EXPECT_EQ(latency.max_s, 1000e-6);
  for (const auto& [is, exact] : {std::pair{latency.p50_s, 500e-6}, {latency.p90_s, 900e-6}, {latency.p99_s, 990e-6}}) {
    EXPECT_GE(is, exact);
    EXPECT_LE(is, exact * 1.126);
  }
  mem::LatencyHistogram extremes;
  extremes.record(std::chrono::nanoseconds(-5));
  extremes.record(std::chrono::nanoseconds(0));
  extremes.record(std::chrono::hours(1));
  EXPECT_EQ(extremes.summary().count, 3u);
  EXPECT_EQ(extremes.summary().p99_s, 3600.0);
  EXPECT_LE(extremes.summary().p50_s, 1e-6);
}

TEST(Latency, is_in_the_statistics) {
  for (const std::string& engine : engine_names()) {
    const Setup setup({engine, true}, [](FaultyEngine& each) {
      each.on_result = [](const mem::IoRequest& request, std::int64_t&) {
        if (!request.write && request.offset == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      };
    });
    Pattern data(8 * kBlock, 1);
    setup.file->write("k", data.data(), data.nbytes()).wait();
    setup.file->read("k", data.data(), data.nbytes()).wait();
    const auto stats = setup.file->stats();
    EXPECT_EQ(stats.write_latency.count, 8u);
    EXPECT_EQ(stats.read_latency.count, 8u);
    EXPECT_GE(stats.read_latency.max_s, 0.02);
    for (const auto& each : {stats.read_latency, stats.write_latency}) {
      EXPECT_GT(each.p50_s, 0.0);
      EXPECT_LE(each.p50_s, each.p90_s);
      EXPECT_LE(each.p90_s, each.p99_s);
      EXPECT_LE(each.p99_s, each.max_s);
    }
  }
}
