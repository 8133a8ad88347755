// A drive that misbehaves: an engine between SwapFile and the real one changes requests and results on purpose.
#include <atomic>
#include <cerrno>
#include <functional>
#include <random>
#include <thread>

#include "mem/io_engine.hpp"
#include "mem/swap_file_impl.hpp"
#include "mem_test.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

/// Shows each request to `on_request` (which may shorten it) and each result to `on_result` (which may change it).
class FaultyEngine final : public mem::IoEngine {
 public:
  std::function<void(mem::IoRequest&)> on_request = [](mem::IoRequest&) {};
  std::function<void(const mem::IoRequest&, std::int64_t&)> on_result = [](const mem::IoRequest&, std::int64_t&) {};

  const char* name() const override { return "faulty"; }
  int depth() const override { return inner_->depth(); }
  void wake() noexcept override { inner_->wake(); }

  void submit(std::span<const mem::IoRequest> requests) override {
    for (mem::IoRequest request : requests) {
      on_request(request);
      auto* kept = new mem::IoRequest(request);
      request.user = kept;
      inner_->submit({&request, 1});
    }
  }

  int reap(std::span<mem::IoResult> results) override {
    const int count = inner_->reap(results);
    for (int i = 0; i < count; ++i) {
      mem::IoResult& result = results[static_cast<std::size_t>(i)];
      const std::unique_ptr<mem::IoRequest> request(static_cast<mem::IoRequest*>(result.user));
      result.user = request->user;
      on_result(*request, result.result);
    }
    return count;
  }

 private:
  std::unique_ptr<mem::IoEngine> inner_ = mem::make_thread_engine(4);
};

struct Setup {
  explicit Setup(bool direct = true, const std::function<void(FaultyEngine&)>& prepare = [](FaultyEngine&) {}) {
    auto made = std::make_unique<FaultyEngine>();
    prepare(*made);
    SwapFile::Options options;
    options.block_nbytes = 64 << 10;
    options.direct = direct;
    file = mem::open_swap_file(temp.path(), options, std::move(made));
  }
  TempDirectory temp;
  std::unique_ptr<SwapFile> file;
};

constexpr std::size_t kNbytes = 500003;

}  // namespace

TEST(SwapFaults, short_counts_are_resumed) {
  for (const bool direct : {true, false}) {
    Setup setup(direct, [random = std::make_shared<std::mt19937>(1)](FaultyEngine& engine) {
      engine.on_request = [random](mem::IoRequest& request) {
        const std::size_t half = request.nbytes / 2 / 4096 * 4096;
        if (half > 0 && (*random)() % 2 == 0) request.nbytes = half;
      };
      // Results off any alignment: more was moved than is said, so the rest is moved again.
      engine.on_result = [random](const mem::IoRequest&, std::int64_t& result) {
        if (result > 8192 && (*random)() % 2 == 0) result -= 777;
      };
    });
    Pattern out(kNbytes, 1), in(kNbytes, 2, 3);
    for (int round = 0; round < 5; ++round) {
      out.fill(static_cast<std::uint64_t>(round));
      setup.file->write("k", out.data(), kNbytes).wait();
      setup.file->read("k", in.data(), kNbytes).wait();
      EXPECT_TRUE(in == out);
    }
    EXPECT_GT(setup.file->stats().retry_count, 0u);
    EXPECT_EQ(setup.file->stats().error_count, 0u);
  }
}

TEST(SwapFaults, eagain_and_eintr_are_retried) {
  std::atomic<int> left{40};
  Setup setup(true, [&left](FaultyEngine& engine) {
    engine.on_result = [&left](const mem::IoRequest&, std::int64_t& result) {
      const int now = left.fetch_sub(1);
      if (now > 0) result = now % 2 == 0 ? -EAGAIN : -EINTR;
    };
  });
  Pattern out(kNbytes, 1), in(kNbytes, 2);
  setup.file->write("k", out.data(), kNbytes).wait();
  setup.file->read("k", in.data(), kNbytes).wait();
  EXPECT_TRUE(in == out);
  EXPECT_EQ(setup.file->stats().retry_count, 40u);
}

TEST(SwapFaults, endless_eagain_ends_in_an_error) {
  Setup setup(true, [](FaultyEngine& engine) {
    engine.on_result = [](const mem::IoRequest&, std::int64_t& result) { result = -EAGAIN; };
  });
  Pattern out(100, 1);
  EXPECT_THROW_WITH(setup.file->write("k", out.data(), 100).wait(), SystemError, "no progress in 100 tries");
}

TEST(SwapFaults, an_error_is_of_its_operation_alone) {
  std::atomic<bool> broken{true};
  Setup setup(true, [&broken](FaultyEngine& engine) {
    engine.on_result = [&broken](const mem::IoRequest& request, std::int64_t& result) {
      if (broken && request.write && request.offset >= 503808 && request.offset < 569344) result = -EIO;
    };
  });
  Pattern first(kNbytes, 1), second(kNbytes, 2), back(kNbytes, 3);
  Work good = setup.file->write("first", first.data(), kNbytes);
  Work bad = setup.file->write("second", second.data(), kNbytes);
  good.wait();
  try {
    bad.wait();
    EXPECT_TRUE(false);
  } catch (const SystemError& error) {
    EXPECT_EQ(error.code, EIO);
    EXPECT_EQ(error.path, setup.file->stats().path);
    for (const char* part : {"'second'", "offset 503808", "65536 bytes", "/data"})
      EXPECT_TRUE(std::string(error.what()).find(part) != std::string::npos);
  }
  setup.file->wait();  // the Work has reported it
  EXPECT_THROW_WITH(setup.file->read("second", back.data(), kNbytes).wait(), DataCorrupt, "its last write failed");
  setup.file->read("first", back.data(), kNbytes).wait();
  EXPECT_TRUE(back == first);
  broken = false;
  setup.file->write("second", second.data(), kNbytes).wait();
  setup.file->read("second", back.data(), kNbytes).wait();
  EXPECT_TRUE(back == second);
  EXPECT_EQ(setup.file->stats().error_count, 2u);
}

TEST(SwapFaults, wait_throws_what_no_work_reported) {
  std::atomic<bool> broken{true};
  Setup setup(true, [&broken](FaultyEngine& engine) {
    engine.on_result = [&broken](const mem::IoRequest&, std::int64_t& result) {
      if (broken) result = -EIO;
    };
  });
  Pattern out(kNbytes, 1);
  setup.file->write("dropped", out.data(), kNbytes);
  EXPECT_THROW_WITH(setup.file->wait(), SystemError, "'dropped'");
  setup.file->wait();  // said once
  broken = false;
  setup.file->write("dropped", out.data(), kNbytes);
  setup.file->wait();
}

TEST(SwapFaults, silent_bit_flips_are_found) {
  for (const bool direct : {true, false}) {
    std::atomic<bool> flipping{true};
    Setup setup(direct, [&flipping](FaultyEngine& engine) {
      engine.on_result = [&flipping](const mem::IoRequest& request, std::int64_t& result) {
        if (flipping && !request.write && request.offset == 131072 && result > 0) request.data[17] ^= std::byte{16};
      };
    });
    Pattern out(kNbytes, 1), in(kNbytes, 2);
    setup.file->write("m", out.data(), kNbytes).wait();
    Work read = setup.file->read("m", in.data(), kNbytes);
    try {
      read.wait();
      EXPECT_TRUE(false);
    } catch (const DataCorrupt& error) {
      EXPECT_EQ(error.code, EIO);
      EXPECT_TRUE(std::string(error.what()).find("'m' at offset 131072") != std::string::npos);
    }
    flipping = false;
    setup.file->read("m", in.data(), kNbytes).wait();
    EXPECT_TRUE(in == out);
  }
}

TEST(SwapFaults, lying_engine_and_zero_counts) {
  std::atomic<std::int64_t> lie{1 << 30};
  Setup setup(true, [&lie](FaultyEngine& engine) {
    engine.on_result = [&lie](const mem::IoRequest&, std::int64_t& result) { result = lie; };
  });
  Pattern data(100, 1);
  EXPECT_THROW_WITH(setup.file->write("k", data.data(), 100).wait(), SystemError, "bytes reported");
  lie = 0;
  EXPECT_THROW_WITH(setup.file->write("k", data.data(), 100).wait(), SystemError, "the last returned 0");
  lie = 4096;
  setup.file->write("k", data.data(), 100).wait();
  lie = 0;
  EXPECT_THROW_WITH(setup.file->read("k", data.data(), 100).wait(), DataCorrupt, "end of file");
}

TEST(SwapFaults, a_broken_engine_ends_everything_with_its_error) {
  std::atomic<bool> broken{false};
  Setup setup(true, [&broken](FaultyEngine& engine) {
    engine.on_request = [&broken](mem::IoRequest&) {
      if (broken) throw SystemError(EBADF, "the engine is gone");
    };
  });
  Pattern data(kNbytes, 1);
  setup.file->write("k", data.data(), kNbytes).wait();
  broken = true;
  Work first = setup.file->write("k", data.data(), kNbytes);
  EXPECT_THROW_WITH(first.wait(), SystemError, "the engine is gone");
  EXPECT_THROW_WITH(setup.file->write("k", data.data(), kNbytes).wait(), SystemError, "the engine is gone");
  setup.file->close();
  EXPECT_TRUE(setup.temp.names().empty());
}

TEST(SwapFaults, more_operations_than_the_queue_takes) {
  Setup setup;
  Pattern data(64, 1);
  std::vector<Work> works;
  for (int i = 0; i < 10000; ++i) works.push_back(setup.file->write("k" + std::to_string(i % 50), data.data(), 64));
  setup.file->wait();
  for (Work& work : works) EXPECT_TRUE(work.done());
  EXPECT_EQ(setup.file->stats().written_nbytes, 640000u);
}
