// The engines themselves: both return each of the kernel's results once, unchanged.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <map>

#include "base/unique_fd.hpp"
#include "faulty_engine.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

std::int64_t result_of(mem::IoEngine& engine, const mem::IoRequest& request) {
  std::array<mem::IoResult, 4> results{};
  engine.submit({&request, 1});
  int count = 0;
  while (count == 0) count = engine.reap(results);
  EXPECT_EQ(count, 1);
  EXPECT_EQ(results[0].user, request.user);
  return results[0].result;
}

}  // namespace

TEST(IoEngine, both_are_there_or_said_to_be_absent) { EXPECT_EQ(engine_names().front(), "threads"); }

TEST(IoEngine, what_the_kernel_refuses_is_the_result) {
  const TempDirectory temp;
  const UniqueFd file(::open((temp.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  const UniqueFd write_only(::open((temp.path() + "/file").c_str(), O_WRONLY | O_CLOEXEC));
  const UniqueFd full(::open("/dev/full", O_RDWR | O_CLOEXEC));
  Pattern data(8192, 1);
  for (const std::string& name : engine_names()) {
    const auto engine = make_engine(name, 4);
    int tag = 0;
    EXPECT_EQ(result_of(*engine, {true, file.get(), data.data(), 5000, 0, &tag}), 5000);
    EXPECT_EQ(result_of(*engine, {false, file.get(), data.data(), 8192, 4096, &tag}), 904);  // the file ends there
    EXPECT_EQ(result_of(*engine, {false, file.get(), data.data(), 8192, 5000, &tag}), 0);
    EXPECT_EQ(result_of(*engine, {true, full.get(), data.data(), 4096, 0, &tag}), -ENOSPC);
    EXPECT_EQ(result_of(*engine, {false, write_only.get(), data.data(), 4096, 0, &tag}), -EBADF);
    EXPECT_EQ(result_of(*engine, {true, -1, data.data(), 4096, 0, &tag}), -EBADF);
    EXPECT_EQ(result_of(*engine, {false, file.get(), nullptr, 4096, 0, &tag}), -EFAULT);
  }
}

TEST(IoEngine, each_result_comes_once) {
  const TempDirectory temp;
  const UniqueFd file(::open((temp.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  Pattern data(200 * 4096, 1);  // a place for each: requests on one would race
  for (const std::string& name : engine_names()) {
    constexpr int kDepth = 7;
    const auto engine = make_engine(name, kDepth);
    EXPECT_EQ(engine->depth(), kDepth);
    std::map<void*, int> seen;
    std::array<int, 200> tags{};
    std::array<mem::IoResult, 3> results{};
    int in_flight = 0;
    std::size_t next = 0;
    while (next < tags.size() || in_flight > 0) {
      std::vector<mem::IoRequest> batch;
      while (in_flight < kDepth && next < tags.size()) {
        batch.push_back({next % 2 == 0, file.get(), data.data() + next * 4096, 4096, next * 4096, &tags[next]});
        ++next;
        ++in_flight;
      }
      engine->submit(batch);
      const int count = engine->reap(results);
      for (int i = 0; i < count; ++i) ++seen[results[static_cast<std::size_t>(i)].user];
      in_flight -= count;
    }
    EXPECT_EQ(seen.size(), tags.size());
    for (const auto& [user, count] : seen) EXPECT_EQ(count, 1);
  }
}

TEST(IoEngine, poll_never_blocks_and_misses_nothing) {
  const TempDirectory temp;
  const UniqueFd file(::open((temp.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  Pattern data(64 << 10, 1);
  for (const std::string& name : engine_names()) {
    auto engine = make_engine(name, 8);
    std::array<mem::IoResult, 3> results{};
    EXPECT_EQ(engine->poll(results), 0);
    std::vector<mem::IoRequest> batch;
    for (std::uint64_t i = 0; i < 8; ++i) batch.push_back({true, file.get(), data.data(), 64 << 10, i << 16, &data});
    engine->submit(batch);
    int seen = 0;
    while (seen < 8) {
      const int count = engine->poll(results);
      for (int i = 0; i < count; ++i) EXPECT_EQ(results[static_cast<std::size_t>(i)].result, 64 << 10);
      seen += count;
      if (count == 0) std::this_thread::yield();
    }
    EXPECT_EQ(engine->poll(results), 0);
  }
}

TEST(IoEngine, wake_ends_a_reap_and_an_end_with_requests_in_flight_is_clean) {
  const TempDirectory temp;
  const UniqueFd file(::open((temp.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  Pattern data(1 << 20, 1);
  for (const std::string& name : engine_names()) {
    auto engine = make_engine(name, 8);
    std::array<mem::IoResult, 8> results{};
    engine->wake();  // before
    EXPECT_EQ(engine->reap(results), 0);
    std::thread waker([&engine] { engine->wake(); });  // during, or before
    EXPECT_EQ(engine->reap(results), 0);
    waker.join();
    std::vector<mem::IoRequest> batch;
    for (std::uint64_t i = 0; i < 8; ++i) batch.push_back({true, file.get(), data.data(), 1 << 20, i << 20, &data});
    engine->submit(batch);
    engine.reset();
  }
}
