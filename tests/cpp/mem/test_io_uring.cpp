// The io_uring engine on a kernel that fails it: calls that fail or do nothing, requests that are never taken.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.hpp"
#include "faulty_engine.hpp"
#include "forbid.hpp"
#include "mem/io/kernel_ring.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

using mem::ring_abi::kCallEnter;

/// The code of the SystemError that `body` throws, with its message in the second argument; 0: none.
template <class Body>
int error_of(const Body& body, std::string& what) {
  try {
    body();
  } catch (const SystemError& error) {
    what = error.what();
    return error.code;
  }
  return 0;
}

/// A file and an engine of `depth` that has worked once, in a child; `body` returns 0 if all is well.
template <class Body>
void with_engine(int depth, const Body& body) {
  const TempDirectory temp;
  const int status = in_child([&] {
    const auto engine = mem::make_io_uring_engine(depth);
    if (engine == nullptr) return kSkipped;
    const UniqueFd file(::open((temp.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    Pattern data(4096, 1);
    const mem::IoRequest request{true, file.get(), data.data(), 4096, 0, &data};
    std::array<mem::IoResult, 8> results{};
    engine->submit({&request, 1});
    if (engine->reap(results) != 1) return 1;
    return body(*engine, request);
  });
  if (status == kSkipped) {
    std::cout << "     no io_uring or no seccomp filters here: skipped\n";
  } else {
    EXPECT_EQ(status, 0);
  }
}

/// Counts how often each request is returned within `engine`'s next results, until `count` have been.
std::map<void*, int> collect(mem::IoEngine& engine, int count) {
  std::map<void*, int> seen;
  std::array<mem::IoResult, 3> results{};
  while (count > 0) {
    const int got = engine.reap(results);
    for (int i = 0; i < got; ++i) ++seen[results[static_cast<std::size_t>(i)].user];
    count -= got;
  }
  return seen;
}

}  // namespace

TEST(IoUring, no_memory_for_requests_ends_in_its_error) {
  with_engine(8, [](mem::IoEngine& engine, const mem::IoRequest& request) {
    if (!forbid(kCallEnter, EAGAIN, {1})) return kSkipped;
    std::string what;
    // And the engine's destructor does not wait for requests that were never submitted.
    return error_of([&] { engine.submit({&request, 1}); }, what) == EAGAIN ? 0 : 2;
  });
}

TEST(IoUring, calls_that_do_nothing_end_in_an_error) {
  with_engine(8, [](mem::IoEngine& engine, const mem::IoRequest& request) {
    if (!forbid(kCallEnter, 0)) return kSkipped;
    std::string what;
    if (error_of([&] { engine.submit({&request, 1}); }, what) != EIO) return 2;
    if (what.find("submitting requests: the kernel did nothing") == std::string::npos) return 3;
    std::array<mem::IoResult, 8> results{};
    if (engine.poll(results) != 0) return 4;
    if (error_of([&] { engine.reap(results); }, what) != EIO) return 5;
    return what.find("waiting for completions: the kernel did nothing") == std::string::npos ? 6 : 0;
  });
}

TEST(IoUring, what_a_failed_submit_left_over_comes_back_once) {
  for (const bool submit_again : {true, false}) {
    with_engine(4, [submit_again](mem::IoEngine&, const mem::IoRequest& request) {
      const auto fresh = mem::make_io_uring_engine(4);  // its first wait adds a request of the engine's own
      mem::IoEngine& engine = *fresh;
      if (!forbid(kCallEnter, EAGAIN, {3, 3})) return kSkipped;  // three requests together; four go out
      std::array<int, 4> tags{};
      std::vector<mem::IoRequest> requests;
      for (int& tag : tags) requests.push_back({true, request.fd, request.data, 4096, 0, &tag});
      std::string what;
      if (error_of([&] { engine.submit({requests.data(), 3}); }, what) != EAGAIN) return 2;
      try {  // the three are in flight still
        engine.submit({requests.data(), 2});
        return 3;
      } catch (const Error&) {
      }
      const int expected = submit_again ? 4 : 3;
      if (submit_again) engine.submit({&requests[3], 1});
      const auto seen = collect(engine, expected);  // without submit(), the wait submits them
      if (static_cast<int>(seen.size()) != expected) return 4;
      for (const auto& [user, times] : seen)
        if (times != 1) return 5;
      return 0;
    });
  }
}

TEST(IoUring, the_end_waits_for_what_is_in_flight_after_a_failed_submit) {
  const TempDirectory temp;
  const int status = in_child([&] {
    int ends[2];
    auto engine = mem::make_io_uring_engine(8);
    if (engine == nullptr || ::pipe(ends) != 0) return kSkipped;
    std::array<std::byte, 1> byte{};
    const mem::IoRequest slow{false, ends[0], byte.data(), 1, static_cast<std::uint64_t>(-1), &byte};
    engine->submit({&slow, 1});
    if (!forbid(kCallEnter, EAGAIN, {1})) return kSkipped;
    std::vector<mem::IoRequest> never(3, slow);
    std::string what;
    if (error_of([&] { engine->submit(never); }, what) != EAGAIN) return 2;
    std::atomic<bool> written{false};
    std::thread writer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      written = true;
      [[maybe_unused]] const auto put = ::write(ends[1], "x", 1);
    });
    engine.reset();
    const bool waited = written;
    writer.join();
    return waited && byte[0] == std::byte{'x'} ? 0 : 3;
  });
  if (status != kSkipped) EXPECT_EQ(status, 0);
}

TEST(IoUring, more_than_its_depth_is_refused_whole) {
  const TempDirectory temp;
  const UniqueFd file(::open((temp.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  Pattern data(4096, 1);
  for (const std::string& name : engine_names()) {
    const auto engine = make_engine(name, 5);
    std::array<int, 6> tags{};
    std::vector<mem::IoRequest> requests;
    for (int& tag : tags) requests.push_back({true, file.get(), data.data(), 4096, 0, &tag});
    EXPECT_THROW_WITH(engine->submit(requests), Error, "more than 5 requests");
    engine->submit({requests.data(), 5});
    EXPECT_EQ(collect(*engine, 5).size(), 5u);
  }
}
