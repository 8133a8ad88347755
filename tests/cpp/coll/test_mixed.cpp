// Mixed operations: random ones, several in flight, on several communicators from several threads, blocking and not.
//
// Each communicator has a thread per rank; all draw the same operations from the same seed, and check their results.
#include <deque>

#include "coll/support/comm_world.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

using Ints = std::vector<std::int32_t>;

std::int32_t value(unsigned salt, int rank, std::size_t i) {
  return static_cast<std::int32_t>((salt * 7919u + static_cast<unsigned>(rank) * 104729u + i * 31u) % 100003u);
}

/// One operation in flight: its buffers, and their expected contents after its end.
struct Job {
  std::shared_ptr<SymmetricBuffer> symmetric;  // replaces `data` if the job fits
  Ints data, other, wanted;
  std::int32_t* checked = nullptr;
  Work work;
};

class Stream {
 public:
  Stream(Communicator& comm, unsigned seed) : comm_(comm), engine_(seed) {
    for (auto& buffer : symmetric_) buffer = comm.allocate(kMost * 9 * sizeof(std::int32_t));
  }

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      if (jobs_.size() == std::size(symmetric_)) finish();
      start(static_cast<unsigned>(i));
    }
    while (!jobs_.empty()) finish();
  }

 private:
  static constexpr std::size_t kMost = 4000;

  void start(unsigned salt) {
    const auto ranks = static_cast<std::size_t>(comm_.world_size()), me = static_cast<std::size_t>(comm_.rank());
    const unsigned kind = engine_() % 8, size = engine_() % 3, placing = engine_() % 3;
    const std::size_t n = size == 0 ? engine_() % 4 : size == 1 ? engine_() % 200 : engine_() % kMost;
    const int root = static_cast<int>(engine_() % ranks);
    const bool async = engine_() % 2 == 0, at_root = comm_.rank() == root;
    const Call call("mixed", async);
    jobs_.emplace_back();
    Job& job = jobs_.back();
    // `big` has room for a part of every rank, `small` for one part.
    if (placing == 0 || (placing == 1 && comm_.rank() % 2 == 0))
      job.symmetric = symmetric_[salt % std::size(symmetric_)];
    job.data.assign(job.symmetric ? 1 : ranks * n + 1, 0);
    std::int32_t* big = job.symmetric ? reinterpret_cast<std::int32_t*>(job.symmetric->data()) : job.data.data();
    job.other.assign(ranks * n + 1, 0);
    std::int32_t* small = job.other.data();
    const auto mine = [&](std::int32_t* to, std::size_t count) {
      for (std::size_t i = 0; i < count; ++i) to[i] = value(salt, comm_.rank(), i);
    };
    const auto sum = [&](std::size_t begin, std::size_t count) {
      job.wanted.assign(count, 0);
      for (std::size_t i = 0; i < count; ++i)
        for (int r = 0; r < comm_.world_size(); ++r) job.wanted[i] += value(salt, r, begin + i);
    };
    const auto all = [&] {
      for (int r = 0; r < comm_.world_size(); ++r)
        for (std::size_t i = 0; i < n; ++i) job.wanted.push_back(value(salt, r, i));
    };
    job.checked = big;
    const Buffer whole{big, ranks * n}, part{small, n}, one{big, n};
    const ConstBuffer whole_in{big, ranks * n}, part_in{small, n};
    const std::size_t root_side = at_root ? 1 : 0;
    switch (kind) {
      case 0:
        mine(big, n), sum(0, n);
        job.work = comm_.all_reduce({&one, 1}, DType::int32, ReduceOp::sum, call);
        break;
      case 1:
        mine(big, n);
        at_root ? sum(0, n) : job.wanted.assign(big, big + n);
        job.work = comm_.reduce({&one, 1}, DType::int32, ReduceOp::sum, root, call);
        break;
      case 2:
        mine(big, ranks * n), sum(me * n, n), job.checked = small;
        job.work =
            comm_.reduce_scatter({&whole_in, 1}, {&part, 1}, DType::int32, ReduceOp::sum, DType::int32, false, call);
        break;
      case 3:
        mine(small, n), all();
        job.work = comm_.all_gather({&part_in, 1}, {&whole, 1}, DType::int32, call);
        break;
      case 4:
        mine(small, n);
        if (at_root) all();
        job.work = comm_.gather({&part_in, 1}, {&whole, root_side}, DType::int32, root, call);
        break;
      case 5:
        mine(big, ranks * n), job.checked = small;
        for (std::size_t i = 0; i < n; ++i) job.wanted.push_back(value(salt, root, me * n + i));
        job.work = comm_.scatter({&whole_in, root_side}, {&part, 1}, DType::int32, root, call);
        break;
      case 6:
        mine(big, n);
        for (std::size_t i = 0; i < n; ++i) job.wanted.push_back(value(salt, root, i));
        job.work = comm_.broadcast({&one, 1}, DType::int32, root, call);
        break;
      default:
        exchange(job, big, salt, n, call);
    }
    if (!async) EXPECT_TRUE(job.work.done());
  }

  /// From a to b: any part of n elements.
  void exchange(Job& job, std::int32_t* big, unsigned salt, std::size_t n, const Call& call) {
    const auto count = [&](int from, int to) {
      return n == 0 ? 0
                    : (salt + static_cast<std::size_t>(from) * 5 + static_cast<std::size_t>(to) * 11) * 37 % (n + 1);
    };
    std::vector<ConstBuffer> in;
    std::vector<Buffer> out;
    std::size_t sent = 0, got = 0;
    for (int q = 0; q < comm_.world_size(); ++q) {
      in.push_back({big + sent, count(comm_.rank(), q)});
      for (std::size_t i = 0; i < in.back().count; ++i)
        big[sent++] = value(salt + 1 + static_cast<unsigned>(q), comm_.rank(), i);
      out.push_back({job.other.data() + got, count(q, comm_.rank())});
      for (std::size_t i = 0; i < out.back().count; ++i, ++got)
        job.wanted.push_back(value(salt + 1 + static_cast<unsigned>(comm_.rank()), q, i));
    }
    job.checked = job.other.data();
    job.work = comm_.all_to_all(in, out, DType::int32, call);
  }

  void finish() {
    Job& job = jobs_.front();
    job.work.wait();
    EXPECT_TRUE(std::equal(job.wanted.begin(), job.wanted.end(), job.checked));
    jobs_.pop_front();
  }

  Communicator& comm_;
  std::mt19937 engine_;
  std::shared_ptr<SymmetricBuffer> symmetric_[6];  // operation i uses [i % 6]: at most 6 are in flight
  std::deque<Job> jobs_;
};

}  // namespace

TEST(comm_mixed, random_operations) {
  run_worlds(1, 6, [](Rank& self) { Stream(*self.comm, 1u + static_cast<unsigned>(self.world)).run(200); });
}

TEST(comm_mixed, several_communicators_from_several_threads) {
  run_worlds(2, 4, [](Rank& self) {
    std::vector<std::unique_ptr<Communicator>> more;
    for (int i = 0; i < 3; ++i) more.push_back(self.comm->duplicate());
    // Allocations of several communicators need one order on all ranks, so the streams are created before the threads.
    std::vector<std::unique_ptr<Stream>> streams;
    for (unsigned i = 0; i < 3; ++i) streams.push_back(std::make_unique<Stream>(*more[i], 100 + i));
    streams.push_back(std::make_unique<Stream>(*self.comm, 103));
    std::vector<std::thread> threads;
    for (auto& stream : streams)
      threads.emplace_back([&stream] {
        try {
          stream->run(120);
        } catch (const std::exception& error) {
          fail(__FILE__, __LINE__, error.what());
        }
      });
    for (auto& thread : threads) thread.join();
  });
}
