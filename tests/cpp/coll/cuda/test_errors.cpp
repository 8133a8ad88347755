// Backend cuda_ipc after a failure: the same typed errors as on the host, and never a hang.
#include <atomic>
#include <chrono>
#include <deque>

#include "coll/support/device_world.hpp"
#include "coll/support/error_checks.hpp"

using namespace zcomm;
using namespace zcomm::test;
using namespace zcomm::test::calls;

namespace {

void expect_mismatch(int odd, const CommCall& usual, const CommCall& other, std::initializer_list<std::string> parts) {
  const auto run = [](const std::function<void(Rank&)>& body) {
    run_device_world(3, {}, [&](DeviceRank& self) { body(self); });
  };
  test::expect_mismatch(run, odd, usual, other, parts);
}

Work sum(Communicator& comm, std::vector<float>& values, const Call& call = {}) {
  const Buffer buffer{values.data(), values.size()};
  return comm.all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, call);
}

std::vector<float>& kept_for_good(std::size_t count) {
  static std::mutex mutex;
  static auto* const all = new std::deque<std::vector<float>>;
  const std::lock_guard lock(mutex);
  return all->emplace_back(count, 1.0f);
}

}  // namespace

TEST(cuda_ipc_errors, mismatches_have_the_hosts_words) {
  expect_mismatch(
      1, all_reduce(1024), all_reduce(2048),
      {"rank 0, 2: all_reduce float32 sum count=1024 'g'", "rank 1: all_reduce float32 sum count=2048 'g'"});
  expect_mismatch(0, all_reduce(64), [](Communicator& comm) { comm.barrier("b").wait(); }, {"rank 0: barrier 'b'"});
  expect_mismatch(1, reduce_scatter(DType::bfloat16, false), reduce_scatter(DType::float32, false),
                  {"bfloat16 -> float32"});
  expect_mismatch(
      1, [](Communicator& comm) { comm.allocate(100); }, [](Communicator& comm) { comm.allocate(200); },
      {"allocate nbytes=100", "allocate nbytes=200"});
  const auto exchange = [](std::size_t to_next) {
    return [=](Communicator& comm) {
      std::vector<ConstBuffer> in(3, {data, 5});
      std::vector<Buffer> out = buffers_at(data + 1000, 3, 5);
      in[static_cast<std::size_t>((comm.rank() + 1) % 3)].count = to_next;
      comm.all_to_all(in, out, DType::float32).wait();
    };
  };
  expect_mismatch(1, exchange(5), exchange(7), {"rank 1 sends 7 elements to rank 2, which expects 5"});
}

TEST(cuda_ipc_errors, arguments_leave_it_usable) {
  run_device_world(2, {}, [](DeviceRank& self) {
    std::vector<float> values(8, 1);
    const Buffer null{nullptr, 3};
    EXPECT_THROW_WITH(self.comm->all_reduce({&null, 1}, DType::float32, ReduceOp::sum), InvalidArgument, "null");
    EXPECT_THROW_WITH(self.comm->send({}, DType::float32, 1 - self.rank, 0), Unsupported, "cuda_ipc");
    EXPECT_THROW_WITH(self.comm->allocate_shared(64), Unsupported, "shared_empty");
    sum(*self.comm, values).wait();
    EXPECT_EQ(values[7], 2.0f);
  });
}

TEST(cuda_ipc_errors, memory_that_one_rank_has_not_is_refused_on_all) {
  run_device_world(3, {.memory_nbytes = 9 << 20}, [](DeviceRank& self) {  // 2 MiB of it are slots
    auto kept = self.comm->allocate(1000);                                // in a block of 2 MiB
    device::Memory hog;
    if (self.rank == 1) hog = self.device->allocate(3500 << 10);
    expect_contains(message_of<CudaError>([&] { self.comm->allocate(200 << 10); }, "refused"),
                    {"allocating 204800 bytes was refused on rank 1", "simulated:1: out of memory"});
    std::vector<float> values(100, 1);
    sum(*self.comm, values).wait();
    EXPECT_EQ(values[99], 3.0f);
    hog.reset();
    EXPECT_EQ(self.comm->allocate(200 << 10)->nbytes(), std::size_t{200 << 10});
  });
}

TEST(cuda_ipc_errors, a_late_rank_is_named) {
  std::atomic<int> gave_up{0};
  run_device_world(2, {.timeout_s = 0.2}, [&](DeviceRank& self) {
    std::vector<float> values(16, 1);
    if (self.rank == 1) {
      while (gave_up < 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_THROW_WITH(sum(*self.comm, values).wait(), Timeout, "rank 1");
      return;
    }
    const std::string message = message_of<Timeout>([&] { sum(*self.comm, values, {"grad.7"}).wait(); }, "late");
    expect_contains(message, {"all_reduce float32 sum count=16 'grad.7'", "for rank 1 to enter it"});
    expect_contains(message_of<Timeout>([&] { self.comm->barrier(); }, "afterwards"), {"unusable since", message});
    ++gave_up;
  });
}

TEST(cuda_ipc_errors, a_rank_that_leaves_or_dies_is_lost) {
  for (const bool dies : {false, true})
    for (int world = 2; world <= 4; ++world) {
      std::atomic<int> survivors{world - 1};
      run_device_world(world, {.max_delay_s = 100e-6}, [&](DeviceRank& self) {
        std::vector<float> values(5000, 1);
        sum(*self.comm, values).wait();
        if (self.rank == world - 1) {
          if (dies) {
            self.mesh->drop_dead();
            while (survivors > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          }
          self.comm->close();
          return;
        }
        try {
          for (int i = 0; i < 100000; ++i) sum(*self.comm, values).wait();
          fail(__FILE__, __LINE__, "the loss was not noticed");
        } catch (const PeerLost& error) {
          EXPECT_EQ(error.rank, world - 1);
        }
        EXPECT_THROW_WITH(self.comm->barrier(), PeerLost, "unusable since");
        --survivors;
      });
    }
}

TEST(cuda_ipc_errors, a_lost_device_is_everybodys_error) {
  for (std::uint64_t n = 1; n <= 40; n += 6)
    run_device_world(3, {.timeout_s = 5}, [n](DeviceRank& self) {
      std::vector<float>& values = kept_for_good(3000);  // a lost device may use it at any later time
      sum(*self.comm, values).wait();
      if (self.rank == 1) self.device->lose_after(n);
      try {
        for (int i = 0; i < 100; ++i) sum(*self.comm, values).wait();
        fail(__FILE__, __LINE__, "the loss was not noticed");
      } catch (const CudaError& error) {
        EXPECT_EQ(self.rank, 1);
        expect_contains(error.what(), {"simulated:1", "lost"});
      } catch (const PeerLost& error) {  // the owner of the device has closed by now
        EXPECT_EQ(error.rank, 1);
      } catch (const Error& error) {
        expect_contains(error.what(), {"rank 1 failed", "lost"});
      }
      EXPECT_THROW_WITH(self.comm->barrier(), Error, "unusable since");
    });
}

TEST(cuda_ipc_errors, closing_ends_what_is_under_way) {
  run_device_world(2, {.max_delay_s = 1e-3}, [](DeviceRank& self) {
    auto stream = self.device->make_stream(false);
    std::vector<std::vector<float>> values(30, std::vector<float>(2000, 1));
    std::vector<Work> works;
    Call call;
    call.stream = handle_of(*stream);
    try {
      for (auto& one : values) works.push_back(sum(*self.comm, one, call));
    } catch (const PeerLost&) {  // the other one has closed first
    }
    self.comm->close();
    for (Work& work : works) {
      try {
        work.wait();
      } catch (const Error&) {
      }
    }
    works.clear();
    stream->synchronize();
    EXPECT_THROW_WITH(self.comm->barrier(), Error, "closed");
  });
}
