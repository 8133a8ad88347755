// SwapFile over an engine that fails on purpose: every fault on both engines, direct and buffered.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <thread>

#include "faulty_engine.hpp"
#include "zcomm/error.hpp"

namespace faults_test {

using namespace zcomm;
using namespace zcomm::test;

namespace {

constexpr std::size_t kNbytes = 500003;

bool round_trips(SwapFile& file, const std::string& key, std::uint64_t seed) {
  Pattern out(kNbytes, seed), in(kNbytes, seed + 1, 3);
  file.write(key, out.data(), kNbytes).wait();
  file.read(key, in.data(), kNbytes).wait();
  return in == out;
}

/// Waits for the error of `work` and checks that it names all of the parts.
template <class Error = SystemError>
void expect_error(Work work, int code, const std::string& path, const std::vector<std::string>& parts) {
  try {
    work.wait();
    EXPECT_TRUE(!"an error was expected");
  } catch (const Error& error) {
    EXPECT_EQ(error.code, code);
    EXPECT_EQ(error.path, path);
    for (const std::string& part : parts)
      if (std::string(error.what()).find(part) == std::string::npos)
        test::fail(__FILE__, __LINE__, "no '" + part + "' in " + error.what());
  }
}

}  // namespace

TEST(SwapFaults, short_counts_are_resumed) {
  on_each_rig([](const Rig& rig) {
    const Setup setup(rig, [random = std::make_shared<std::mt19937>(1)](FaultyEngine& engine) {
      engine.on_request = [random](mem::IoRequest& request) {
        const std::size_t half = request.nbytes / 2 / 4096 * 4096;
        if (half > 0 && (*random)() % 2 == 0) request.nbytes = half;
      };
      // Results off any alignment: more was moved than is reported, so the rest is moved again.
      engine.on_result = [random](const mem::IoRequest&, std::int64_t& result) {
        if (result > 8192 && (*random)() % 2 == 0) result -= 777;
      };
    });
    for (std::uint64_t round = 0; round < 5; ++round) EXPECT_TRUE(round_trips(*setup.file, "k", round));
    EXPECT_GT(setup.file->stats().retry_count, 0u);
    EXPECT_EQ(setup.file->stats().error_count, 0u);
  });
}

TEST(SwapFaults, eagain_and_eintr_are_retried) {
  on_each_rig([](const Rig& rig) {
    std::atomic<int> left{40};
    const Setup setup(rig, [&left](FaultyEngine& engine) {
      engine.on_result = [&left](const mem::IoRequest&, std::int64_t& result) {
        const int now = left.fetch_sub(1);
        if (now > 0) result = now % 2 == 0 ? -EAGAIN : -EINTR;
      };
    });
    EXPECT_TRUE(round_trips(*setup.file, "k", 1));
    EXPECT_EQ(setup.file->stats().retry_count, 40u);
  });
}

TEST(SwapFaults, endless_eagain_ends_in_an_error_and_the_file_stays_usable) {
  on_each_rig([](const Rig& rig) {
    std::atomic<bool> broken{true};
    const Setup setup(rig, [&broken](FaultyEngine& engine) {
      engine.on_result = [&broken](const mem::IoRequest&, std::int64_t& result) {
        if (broken) result = -EAGAIN;
      };
    });
    Pattern out(kNbytes, 1);
    expect_error(setup.file->write("k", out.data(), kNbytes), EAGAIN, setup.file->stats().path,
                 {"write of key 'k' at offset ", "no progress in 100 tries", "errno 11"});
    broken = false;
    EXPECT_TRUE(round_trips(*setup.file, "k", 2));
  });
}

TEST(SwapFaults, an_error_is_of_its_operation_alone) {
  on_each_rig([](const Rig& rig) {
    for (const int code : {EIO, ENOSPC}) {
      std::atomic<bool> broken{true};
      const Setup setup(rig, [&broken, code](FaultyEngine& engine) {
        engine.on_result = [&broken, code](const mem::IoRequest& request, std::int64_t& result) {
          if (broken && request.write && request.offset >= 503808 && request.offset < 569344) result = -code;
        };
      });
      const std::string path = setup.file->stats().path;
      Pattern first(kNbytes, 1), second(kNbytes, 2), back(kNbytes, 3);
      Work good = setup.file->write("first", first.data(), kNbytes);
      Work bad = setup.file->write("second", second.data(), kNbytes);
      good.wait();
      expect_error(
          std::move(bad), code, path,
          {"write of key 'second'", "offset 503808 of " + path, "65536 bytes", "errno " + std::to_string(code)});
      setup.file->wait();  // the Work has reported it
      EXPECT_THROW_WITH(setup.file->read("second", back.data(), kNbytes).wait(), DataCorrupt, "its last write failed");
      setup.file->read("first", back.data(), kNbytes).wait();
      EXPECT_TRUE(back == first);
      broken = false;
      EXPECT_TRUE(round_trips(*setup.file, "second", 4));
      EXPECT_EQ(setup.file->stats().error_count, 2u);
    }
  });
}

TEST(SwapFaults, a_failed_read_leaves_the_data_on_disk) {
  on_each_rig([](const Rig& rig) {
    std::atomic<bool> broken{false};
    const Setup setup(rig, [&broken](FaultyEngine& engine) {
      engine.on_result = [&broken](const mem::IoRequest& request, std::int64_t& result) {
        if (broken && !request.write && request.offset == 131072) result = -EIO;
      };
    });
    const std::string path = setup.file->stats().path;
    Pattern out(kNbytes, 1), in(kNbytes, 2);
    setup.file->write("k", out.data(), kNbytes).wait();
    broken = true;
    expect_error(setup.file->read("k", in.data(), kNbytes), EIO, path,
                 {"read of key 'k' at offset 131072 of " + path, "errno 5"});
    broken = false;
    setup.file->read("k", in.data(), kNbytes).wait();
    EXPECT_TRUE(in == out);
  });
}

TEST(SwapFaults, wait_throws_what_no_work_reported) {
  on_each_rig([](const Rig& rig) {
    std::atomic<bool> broken{true};
    const Setup setup(rig, [&broken](FaultyEngine& engine) {
      engine.on_result = [&broken](const mem::IoRequest&, std::int64_t& result) {
        if (broken) result = -EIO;
      };
    });
    Pattern out(kNbytes, 1);
    setup.file->write("dropped", out.data(), kNbytes);
    EXPECT_THROW_WITH(setup.file->wait(), SystemError, "'dropped'");
    setup.file->wait();  // reported once
    broken = false;
    setup.file->write("dropped", out.data(), kNbytes);
    setup.file->wait();
  });
}

TEST(SwapFaults, silent_bit_flips_are_found) {
  on_each_rig([](const Rig& rig) {
    std::atomic<bool> flipping{true};
    const Setup setup(rig, [&flipping](FaultyEngine& engine) {
      engine.on_result = [&flipping](const mem::IoRequest& request, std::int64_t& result) {
        if (flipping && !request.write && request.offset == 131072 && result > 0) request.data[17] ^= std::byte{16};
      };
    });
    Pattern out(kNbytes, 1), in(kNbytes, 2);
    setup.file->write("m", out.data(), kNbytes).wait();
    expect_error<DataCorrupt>(setup.file->read("m", in.data(), kNbytes), EIO, setup.file->stats().path,
                              {"key 'm' at offset 131072", "crc32c"});
    flipping = false;
    setup.file->read("m", in.data(), kNbytes).wait();
    EXPECT_TRUE(in == out);
  });
}

TEST(SwapFaults, a_write_that_hits_another_place_is_found) {
  on_each_rig([](const Rig& rig) {  // misdirected writes: the drive reports success, and the data are elsewhere
    std::atomic<bool> astray{true};
    const Setup setup(rig, [&astray](FaultyEngine& engine) {
      engine.on_request = [&astray](mem::IoRequest& request) {
        if (astray && request.write && request.offset == 65536) request.offset = 0;
      };
    });
    Pattern out(kNbytes, 1), in(kNbytes, 2);
    setup.file->write("k", out.data(), kNbytes).wait();
    EXPECT_THROW_WITH(setup.file->read("k", in.data(), kNbytes).wait(), DataCorrupt, "'k' at offset ");
    astray = false;
    EXPECT_TRUE(round_trips(*setup.file, "k", 3));
  });
}

TEST(SwapFaults, lying_engine_and_zero_counts) {
  on_each_rig([](const Rig& rig) {
    std::atomic<std::int64_t> lie{1 << 30};
    const Setup setup(rig, [&lie](FaultyEngine& engine) {
      engine.on_result = [&lie](const mem::IoRequest& request, std::int64_t& result) {
        result = lie < 0 ? static_cast<std::int64_t>(request.nbytes) : lie.load();
      };
    });
    Pattern data(100, 1);
    EXPECT_THROW_WITH(setup.file->write("k", data.data(), 100).wait(), SystemError, "bytes reported");
    lie = 0;
    EXPECT_THROW_WITH(setup.file->write("k", data.data(), 100).wait(), SystemError, "the last returned 0");
    lie = -1;
    setup.file->write("k", data.data(), 100).wait();
    lie = 0;
    EXPECT_THROW_WITH(setup.file->read("k", data.data(), 100).wait(), DataCorrupt, "end of file");
  });
}

TEST(SwapFaults, results_out_of_order_and_late) {
  on_each_rig([](const Rig& rig) {
    const Setup setup(rig, [random = std::make_shared<std::mt19937>(5)](FaultyEngine& engine) {
      engine.reorder = true;
      engine.on_result = [random](const mem::IoRequest&, std::int64_t&) {
        if ((*random)() % 16 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      };
    });
    std::vector<Pattern> out, in;
    for (std::size_t i = 0; i < 12; ++i) {
      out.emplace_back(i * 70001 % kNbytes, i);
      in.emplace_back(out[i].nbytes(), 99);
    }
    for (int round = 0; round < 3; ++round) {
      std::vector<Work> works;
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i].fill(i * 10 + static_cast<std::size_t>(round));
        works.push_back(setup.file->write("k" + std::to_string(i), out[i].data(), out[i].nbytes()));
        works.push_back(setup.file->read("k" + std::to_string(i), in[i].data(), in[i].nbytes()));
      }
      setup.file->wait();
      for (std::size_t i = 0; i < out.size(); ++i) EXPECT_TRUE(in[i] == out[i]);
    }
  });
}

TEST(SwapFaults, all_faults_at_once_are_errors_or_right_numbers) {
  on_each_rig([](const Rig& rig) {
    std::atomic<bool> broken{true};
    const Setup setup(rig, [&broken, random = std::make_shared<std::mt19937>(9)](FaultyEngine& engine) {
      engine.reorder = true;
      engine.on_request = [&broken, random](mem::IoRequest& request) {
        if (broken && request.nbytes > 8192 && (*random)() % 8 == 0) request.nbytes = 8192;
      };
      engine.on_result = [&broken, random](const mem::IoRequest& request, std::int64_t& result) {
        if (!broken) return;
        const auto dice = (*random)() % 64;
        if (dice < 4) result = -EAGAIN;
        if (dice == 4) result = -EIO;
        if (dice == 5 && request.write) result = -ENOSPC;
        if (dice == 6 && !request.write && result > 0) request.data[(*random)() % 4096] ^= std::byte{1};
      };
    });
    constexpr std::size_t kKeys = 6;
    std::vector<Pattern> out, in;
    for (std::size_t i = 0; i < kKeys; ++i) {
      out.emplace_back(70000 + i * 20011, i);
      in.emplace_back(out[i].nbytes(), 99);
    }
    int errors = 0;
    for (int round = 0; round < 12; ++round) {
      if (round == 9) broken = false;
      std::vector<Work> writes, reads;
      for (std::size_t i = 0; i < kKeys; ++i) {
        out[i].fill(i + 100 * static_cast<std::size_t>(round));
        in[i].fill(1);
        writes.push_back(setup.file->write("k" + std::to_string(i), out[i].data(), out[i].nbytes()));
        reads.push_back(setup.file->read("k" + std::to_string(i), in[i].data(), in[i].nbytes()));
      }
      for (std::size_t i = 0; i < kKeys; ++i) {
        try {
          reads[i].wait();
          EXPECT_TRUE(in[i] == out[i]);
        } catch (const SystemError& error) {
          ++errors;
          EXPECT_TRUE(broken && std::string(error.what()).find("'k" + std::to_string(i) + "'") != std::string::npos);
        }
        try {
          writes[i].wait();
        } catch (const SystemError&) {
          EXPECT_TRUE(broken);
        }
      }
    }
    EXPECT_GT(errors, 0);
    setup.file->wait();
  });
}

TEST(SwapFaults, a_broken_engine_ends_everything_with_its_error) {
  on_each_rig([](const Rig& rig) {
    std::atomic<bool> broken{false};
    const Setup setup(rig, [&broken](FaultyEngine& engine) {
      engine.on_request = [&broken](mem::IoRequest& request) {
        if (broken && request.offset >= 196608) throw SystemError(EBADF, "the engine is gone");
      };
    });
    Pattern data(kNbytes, 1);
    setup.file->write("k", data.data(), kNbytes).wait();
    broken = true;
    std::vector<Work> works;  // some in flight, some queued
    try {
      for (int i = 0; i < 8; ++i) works.push_back(setup.file->write("k", data.data(), kNbytes));
    } catch (const SystemError&) {  // refused already
    }
    for (Work& work : works) EXPECT_THROW_WITH(work.wait(), SystemError, "the engine is gone");
    EXPECT_THROW_WITH(setup.file->write("k", data.data(), kNbytes).wait(), SystemError, "the engine is gone");
    EXPECT_THROW_WITH(setup.file->read("k", data.data(), kNbytes).wait(), SystemError, "the engine is gone");
    setup.file->wait();
    setup.file->close();
    EXPECT_TRUE(std::filesystem::is_empty(setup.directories[0]));
  });
}

TEST(SwapFaults, close_ends_while_everything_fails) {
  on_each_rig([](const Rig& rig) {
    Pattern data(kNbytes, 1);
    const Setup setup(rig, [](FaultyEngine& engine) {
      engine.on_result = [](const mem::IoRequest& request, std::int64_t& result) {
        result = request.offset % 131072 == 0 ? -EIO : -ENOSPC;
      };
    });
    std::vector<Work> works;
    for (int i = 0; i < 20; ++i) works.push_back(setup.file->write("k" + std::to_string(i % 7), data.data(), kNbytes));
    setup.file->close();
    EXPECT_TRUE(std::filesystem::is_empty(setup.directories[0]));
    for (Work& work : works) EXPECT_THROW(work.wait(), SystemError);
  });
}

TEST(SwapFaults, more_operations_than_the_queue_takes) {
  for (const std::string& engine : engine_names()) {
    const Setup setup({engine, true});
    Pattern data(64, 1);
    std::vector<Work> works;
    for (int i = 0; i < 10000; ++i) works.push_back(setup.file->write("k" + std::to_string(i % 50), data.data(), 64));
    setup.file->wait();
    for (Work& work : works) EXPECT_TRUE(work.done());
    EXPECT_EQ(setup.file->stats().written_nbytes, 640000u);
  }
}

}  // namespace faults_test
