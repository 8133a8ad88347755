// SwapFile on every engine, direct and buffered.
#include <algorithm>
#include <cerrno>
#include <fstream>
#include <random>
#include <thread>

#include "mem/io/io_engine.hpp"
#include "mem_test.hpp"
#include "zcomm/error.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

const std::size_t kSizes[] = {0, 1, 511, 4096, 4097, (1 << 20) + 3, 20 << 20};

std::string key_of(std::size_t i) { return "key." + std::to_string(i); }

}  // namespace

/// Runs `body(options)` for each configuration that this system has.
template <class Body>
void on_all(Body body) {
  const bool has_uring = mem::make_io_uring_engine(4) != nullptr;
  for (const auto& options : all_options())
    if (has_uring || options.engine != SwapFile::Engine::io_uring) body(options);
}

TEST(SwapFile, sizes_and_alignments_round_trip) {
  on_all([](const SwapFile::Options& options) {
    const TempDirectory temp;
    const auto file = SwapFile::open(temp.path(), options);
    std::uint64_t total = 0;
    for (const std::size_t shift : {std::size_t{0}, std::size_t{64}, std::size_t{3}}) {
      for (const std::size_t nbytes : kSizes) {
        if (kSanitized && shift == 64 && nbytes > (2 << 20)) continue;
        total += nbytes;
        Pattern out(nbytes, nbytes + shift, shift), in(nbytes, 1, (shift + 1) % 4);
        const std::string key = "k" + std::to_string(nbytes);
        file->write(key, out.data(), nbytes).wait();
        file->read(key, in.data(), nbytes).wait();
        EXPECT_TRUE(in == out);
      }
    }
    const auto stats = file->stats();
    EXPECT_EQ(stats.written_nbytes, total);
    EXPECT_EQ(stats.read_nbytes, total);
    EXPECT_EQ(stats.error_count, 0u);
    EXPECT_GT(stats.read_s, 0.0);
    EXPECT_GT(stats.write_s, 0.0);
    EXPECT_GE(stats.file_nbytes, stats.reserved_nbytes);
    EXPECT_LE(stats.bounce_nbytes, options.depth * (options.block_nbytes + 4096));
    EXPECT_EQ(stats.engine, options.engine == SwapFile::Engine::threads ? "threads" : "io_uring");
    if (!options.direct) EXPECT_FALSE(stats.direct);
  });
}

TEST(SwapFile, many_keys_in_random_order_overwritten) {
  on_all([](const SwapFile::Options& options) {
    const TempDirectory temp;
    const auto file = SwapFile::open(temp.path(), options);
    std::mt19937 random(7);
    std::vector<Pattern> values;
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < 100; ++i) {
      values.emplace_back(random() % 50000, i, random() % 2 * 5);
      order.push_back(i);
    }
    for (int round = 0; round < 3; ++round) {
      std::shuffle(order.begin(), order.end(), random);
      std::vector<Work> works;
      for (const std::size_t i : order) {
        values[i].fill(i * 10 + static_cast<std::size_t>(round));
        works.push_back(file->write(key_of(i), values[i].data(), values[i].nbytes()));
      }
      std::shuffle(order.begin(), order.end(), random);
      std::vector<Pattern> back;
      for (const std::size_t i : order) back.emplace_back(values[i].nbytes(), 999);
      for (std::size_t n = 0; n < order.size(); ++n)  // no wait in between: each read follows its key's write
        works.push_back(file->read(key_of(order[n]), back[n].data(), back[n].nbytes()));
      for (Work& work : works) work.wait();
      for (std::size_t n = 0; n < order.size(); ++n) EXPECT_TRUE(back[n] == values[order[n]]);
    }
  });
}

TEST(SwapFile, operations_on_one_key_keep_their_order) {
  on_all([](const SwapFile::Options& options) {
    const TempDirectory temp;
    const auto file = SwapFile::open(temp.path(), options);
    constexpr std::size_t kNbytes = 700000;
    std::vector<Pattern> out, in;
    for (std::size_t i = 0; i < 8; ++i) {
      out.emplace_back(kNbytes, i);
      in.emplace_back(kNbytes, 99);
    }
    std::vector<Work> works;
    for (std::size_t i = 0; i < 8; ++i) {
      works.push_back(file->write("k", out[i].data(), kNbytes));
      works.push_back(file->read("k", in[i].data(), kNbytes));
    }
    file->wait();
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_TRUE(works[2 * i + 1].done());
      EXPECT_TRUE(in[i] == out[i]);
    }
  });
}

TEST(SwapFile, writers_on_several_threads) {
  on_all([](const SwapFile::Options& options) {
    const TempDirectory temp;
    const auto file = SwapFile::open(temp.path(), options);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 4; ++t)
      threads.emplace_back([&file, t] {
        for (std::size_t i = 0; i < 20; ++i) {
          Pattern out(i * 10007 + t, i + t), in(i * 10007 + t, 99);
          const std::string key = key_of(t) + "/" + key_of(i);
          Work write = file->write(key, out.data(), out.nbytes());
          Work read = file->read(key, in.data(), in.nbytes());
          read.wait();
          EXPECT_TRUE(write.done());
          EXPECT_TRUE(in == out);
          file->stats();
        }
      });
    for (auto& thread : threads) thread.join();
    file->wait();
  });
}

TEST(SwapFile, steady_state_holds_its_memory) {
  on_all([](const SwapFile::Options& options) {
    const TempDirectory temp;
    const auto file = SwapFile::open(temp.path(), options);
    Pattern data(3 * options.block_nbytes + 5, 1, 3);
    SwapFile::Stats first{};
    for (int round = 0; round < 20; ++round) {
      file->write("k", data.data(), data.nbytes()).wait();
      file->read("k", data.data(), data.nbytes()).wait();
      if (round == 0) first = file->stats();
    }
    EXPECT_EQ(file->stats().file_nbytes, first.file_nbytes);
    EXPECT_EQ(file->stats().reserved_nbytes, first.reserved_nbytes);
    EXPECT_LE(file->stats().bounce_nbytes, options.depth * options.block_nbytes);
  });
}

TEST(SwapFile, aligned_keys_are_not_copied_and_others_are_counted) {
  on_all([](const SwapFile::Options& options) {
    const TempDirectory temp;
    const auto file = SwapFile::open(temp.path(), options);
    Pattern pages(2 * options.block_nbytes + 4096, 1), tail(options.block_nbytes + 77, 2), shifted(8192, 3, 64);
    const auto move = [&](const char* key, Pattern& data) {
      const std::uint64_t before = file->stats().bounced_nbytes;
      file->write(key, data.data(), data.nbytes()).wait();
      file->read(key, data.data(), data.nbytes()).wait();
      return file->stats().bounced_nbytes - before;
    };
    const bool direct = file->stats().direct;
    EXPECT_EQ(move("pages", pages), 0u);
    EXPECT_EQ(file->stats().bounce_nbytes, 0u);
    EXPECT_EQ(move("shifted", shifted), direct ? 2 * shifted.nbytes() : 0u);
    const std::uint64_t of_tail = move("tail", tail);
    EXPECT_EQ(of_tail > 0, direct);
    EXPECT_LE(of_tail, 2 * 4096u);
  });
}

TEST(SwapFile, reserve_release_and_preallocation) {
  const TempDirectory temp;
  SwapFile::Options options;
  options.nbytes = 1 << 20;
  const auto file = SwapFile::open(temp.path(), options);
  EXPECT_EQ(file->stats().file_nbytes, 1u << 20);
  EXPECT_EQ(std::filesystem::file_size(data_of(*file)), 1u << 20);
  file->reserve("a", 5000);
  file->reserve("a", 5000);
  EXPECT_EQ(file->stats().reserved_nbytes, 8192u);
  file->reserve("a", 100);
  EXPECT_EQ(file->stats().reserved_nbytes, 4096u);
  file->release("a");
  EXPECT_EQ(file->stats().reserved_nbytes, 0u);
  EXPECT_THROW_WITH(file->release("a"), InvalidArgument, "'a'");
}

TEST(SwapFile, lists_what_was_written) {
  on_all([](const SwapFile::Options& options) {
    const TempDirectory temp;
    const auto file = SwapFile::open(temp.path(), options);
    Pattern data(8192, 1);
    for (const char* key : {"b", "c", "a"}) file->reserve(key, 4096);
    EXPECT_TRUE(file->written().empty());
    file->write("c", data.data(), 4096);
    file->write("a", data.data(), 4096);
    using Keys = std::vector<std::pair<std::string, std::size_t>>;
    EXPECT_TRUE(file->written() == (Keys{{"a", 4096}, {"c", 4096}}));
    file->wait();
    file->reserve("a", 8192);  // another size, with no data written
    EXPECT_TRUE(file->written() == (Keys{{"c", 4096}}));
    file->write("a", data.data(), 8192).wait();
    file->release("c");
    EXPECT_TRUE(file->written() == (Keys{{"a", 8192}}));
  });
}

TEST(SwapFile, wrong_calls_are_named) {
  const TempDirectory temp;
  const auto file = SwapFile::open(temp.path(), {});
  Pattern data(100);
  EXPECT_THROW_WITH(file->read("missing", data.data(), 100), InvalidArgument, "unknown key 'missing'");
  file->reserve("k", 100);
  EXPECT_THROW_WITH(file->read("k", data.data(), 100), InvalidArgument, "never written");
  EXPECT_THROW_WITH(file->write("k", data.data(), 99), InvalidArgument, "has 100 bytes, not 99");
  EXPECT_THROW_WITH(file->write("k", nullptr, 100), InvalidArgument, "null");
  file->write("k", data.data(), 100).wait();
  EXPECT_THROW_WITH(file->read("k", data.data(), 101), InvalidArgument, "has 100 bytes, not 101");
  SwapFile::Options options;
  options.block_nbytes = 1000;
  EXPECT_THROW_WITH(SwapFile::open(temp.path(), options), InvalidArgument, "1000");
  options = {};
  options.depth = 0;
  EXPECT_THROW_WITH(SwapFile::open(temp.path(), options), InvalidArgument, "depth 0");
  file->close();
  file->close();
  EXPECT_THROW_WITH(file->write("k", data.data(), 100), InvalidArgument, "closed");
  EXPECT_THROW_WITH(file->reserve("j", 100), InvalidArgument, "closed");
  file->wait();
  EXPECT_GT(file->stats().written_nbytes, 0u);  // counters remain readable
}

TEST(SwapFile, damage_on_disk_is_found) {
  on_all([](const SwapFile::Options& options) {
    if (options.direct) return;  // the test damages the file through the page cache
    const TempDirectory temp;
    const auto file = SwapFile::open(temp.path(), options);
    Pattern data(600000, 5);
    file->write("layer.3", data.data(), data.nbytes()).wait();
    {
      std::fstream raw(data_of(*file), std::ios::in | std::ios::out | std::ios::binary);
      raw.seekp(300000);
      const char flipped = static_cast<char>(data.data()[300000] ^ std::byte{1});
      raw.write(&flipped, 1);
    }
    Work work = file->read("layer.3", data.data(), data.nbytes());
    EXPECT_THROW_WITH(work.wait(), DataCorrupt, "'layer.3' at offset 262144");
    std::filesystem::resize_file(data_of(*file), 300000);
    EXPECT_THROW_WITH(file->read("layer.3", data.data(), data.nbytes()).wait(), DataCorrupt, "end of file");
    file->write("layer.3", data.data(), data.nbytes()).wait();
    file->read("layer.3", data.data(), data.nbytes()).wait();
    EXPECT_EQ(file->stats().error_count, 2u);
  });
}
