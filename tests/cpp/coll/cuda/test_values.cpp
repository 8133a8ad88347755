// Backend cuda_ipc on simulated devices: its results, bit by bit, on private and symmetric memory.
#include <cstring>
#include <mutex>
#include <set>

#include "coll/support/device_world.hpp"
#include "coll/support/value_checks.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

/// Random values in any dtype.
std::vector<std::byte> random_bytes(DType dtype, std::size_t count, unsigned seed) {
  const auto floats = random_floats(count, seed);
  std::vector<double> values(floats.begin(), floats.end());
  if (!is_floating(dtype))
    for (double& value : values) value = std::floor(std::fmod(std::fabs(value) * 7, dtype == DType::boolean ? 2 : 100));
  return encode(dtype, values);
}

/// Memory of `nbytes` at an odd address, symmetric or not, filled with `content`.
struct Place {
  std::shared_ptr<SymmetricBuffer> symmetric;
  std::vector<std::byte> heap;
  std::byte* data;
  Place(Communicator& comm, bool is_symmetric, const std::vector<std::byte>& content, std::size_t nbytes) {
    constexpr std::size_t kBegin = 16;
    if (is_symmetric) symmetric = comm.allocate(nbytes + kBegin);
    heap.resize(is_symmetric ? 0 : nbytes + kBegin);
    data = (is_symmetric ? symmetric->data() : heap.data()) + kBegin;
    std::memcpy(data, content.data(), nbytes);
  }
};

/// all_reduce, reduce and reduce_scatter (wider, accumulating, too) by `self.comm` and by `host`: the same bits.
void expect_host_bits(Rank& self, Communicator& host, DType dtype, ReduceOp op, std::size_t count, bool symmetric) {
  const auto world = static_cast<std::size_t>(self.world);
  const std::size_t nbytes = count * world * size_of(dtype);
  const auto input = random_bytes(dtype, count * world, 100 + static_cast<unsigned>(self.rank));
  const bool half = dtype == DType::float16 || dtype == DType::bfloat16;
  const auto result = [&](Communicator& comm, int what) {
    Place place(comm, symmetric, input, nbytes);
    const Buffer whole{place.data, count * world};
    if (what == 0) comm.all_reduce({&whole, 1}, dtype, op).wait();
    if (what == 1) comm.reduce({&whole, 1}, dtype, op, self.world - 1).wait();
    std::vector<std::byte> got(place.data, place.data + nbytes);
    if (what < 2) return got;
    const DType out_dtype = what == 3 && half ? DType::float32 : dtype;
    auto out = random_bytes(out_dtype, count, 7);
    const ConstBuffer in{place.data, count * world};
    const Buffer part{out.data(), count};
    comm.reduce_scatter({&in, 1}, {&part, 1}, dtype, op, out_dtype, what == 4).wait();
    return out;
  };
  for (int what = 0; what < 5; ++what)
    if (result(*self.comm, what) != result(host, what))
      fail(__FILE__, __LINE__,
           "other bits than the host's: operation " + std::to_string(what) + " of " + std::string(name_of(dtype)) +
               " " + std::string(name_of(op)) + " count " + std::to_string(count) + " world " +
               std::to_string(self.world) + (symmetric ? " symmetric" : " private"));
}

/// Writes down how many sources of each reduction are reported as remote.
class RemoteSources final : public LendingDevice {
 public:
  RemoteSources(std::shared_ptr<device::Device> inner, std::set<int>& seen)
      : LendingDevice(std::move(inner)), seen_(seen) {}
  std::unique_ptr<device::Stream> make_stream(bool urgent) override {
    return std::make_unique<Spied>(LendingDevice::make_stream(urgent), *this);
  }

 private:
  class Spied final : public BorrowedStream, device::StreamKernels {
   public:
    Spied(std::unique_ptr<device::Stream> inner, RemoteSources& spy)
        : BorrowedStream(*inner), stream_(std::move(inner)), spy_(spy) {}
    device::StreamKernels& kernels() override { return *this; }
    void reduce(const device::Reduce& args) override {
      {
        const std::lock_guard lock(mutex);
        spy_.seen_.insert(args.remote);
      }
      stream_->kernels().reduce(args);
    }
    void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) override {
      stream_->kernels().cast(dst, dst_dtype, src, src_dtype, count);
    }
    void run(const device::KernelTask& task) override { stream_->kernels().run(task); }

   private:
    static inline std::mutex mutex;
    const std::unique_ptr<device::Stream> stream_;
    RemoteSources& spy_;
  };
  std::set<int>& seen_;
};

}  // namespace

TEST(cuda_ipc, reductions_know_how_many_ranks_have_another_device) {
  for (const bool one_device : {true, false}) {
    std::set<int> seen;
    const auto wrap = [&](auto device) { return std::make_shared<RemoteSources>(std::move(device), seen); };
    run_device_world(3, {.one_device = one_device, .wrap = wrap}, [](DeviceRank& self) {
      auto symmetric = self.comm->allocate(4000);
      std::vector<float> mine(1000, 1);
      const Buffer direct{symmetric->data(), 1000}, staged{mine.data(), 1000};
      self.comm->all_reduce({&direct, 1}, DType::float32, ReduceOp::sum).wait();
      self.comm->all_reduce({&staged, 1}, DType::float32, ReduceOp::sum).wait();
    });
    EXPECT_TRUE(seen == std::set<int>{one_device ? 0 : 2});
  }
}

TEST(cuda_ipc, values_on_private_memory) {
  for (const int world : {1, 2, 3, 4, 9})
    run_device_world(world, {.one_device = world == 3}, [world](DeviceRank& self) {
      links::check_all(
          self, world == 9 ? std::initializer_list<std::size_t>{77} : std::initializer_list<std::size_t>{0, 1, 1001});
    });
}

TEST(cuda_ipc, the_hosts_bits) {
  for (const int world : {1, 2, 3, 4, 9}) {
    if (kSanitized && world > 3) break;
    run_device_world(world, {.one_device = world == 2}, [](DeviceRank& self) {
      auto host = Communicator::create(self.mesh, small_slots());
      for (const DType dtype : links::kDTypes)
        for (const ReduceOp op : links::kOps) {
          if (op == ReduceOp::avg && !is_floating(dtype)) continue;
          for (const bool symmetric : {false, true}) expect_host_bits(self, *host, dtype, op, 333, symmetric);
        }
      expect_host_bits(self, *host, DType::bfloat16, ReduceOp::sum, 5001, false);
      host->close();
    });
  }
}

TEST(cuda_ipc, movements_on_symmetric_memory) {
  for (const int world : {1, 2, 3, 4})
    run_device_world(world, {.max_delay_s = 50e-6}, [](DeviceRank& self) {
      const auto ranks = static_cast<std::size_t>(self.world);
      constexpr std::size_t kCount = 1003;
      auto whole = self.comm->allocate(ranks * kCount * 4), part = self.comm->allocate(kCount * 4);
      std::vector<std::int32_t> mine(kCount), all(ranks * kCount);
      for (std::size_t i = 0; i < kCount; ++i) mine[i] = static_cast<std::int32_t>(i) * 10 + self.rank;
      const auto expect_all = [&](const void* got, const char* what) {
        const auto* values = static_cast<const std::int32_t*>(got);
        for (std::size_t i = 0; i < ranks * kCount; ++i)
          if (values[i] != static_cast<std::int32_t>(i % kCount * 10 + i / kCount))
            return fail(__FILE__, __LINE__, std::string(what) + ": element " + std::to_string(i));
      };
      const ConstBuffer heap_in{mine.data(), kCount}, symmetric_in{part->data(), kCount};
      const Buffer heap_out{all.data(), ranks * kCount}, symmetric_out{whole->data(), ranks * kCount};
      for (const bool out : {false, true})
        for (const bool in : {false, true}) {
          std::memcpy(part->data(), mine.data(), kCount * 4);
          std::memset(whole->data(), 0, ranks * kCount * 4);
          self.comm->all_gather({in ? &symmetric_in : &heap_in, 1}, {out ? &symmetric_out : &heap_out, 1}, DType::int32)
              .wait();
          expect_all(out ? static_cast<void*>(whole->data()) : all.data(), "all_gather");
        }
      auto* const own = reinterpret_cast<std::int32_t*>(whole->data()) + static_cast<std::size_t>(self.rank) * kCount;
      std::memset(whole->data(), 0, ranks * kCount * 4);
      std::memcpy(own, mine.data(), kCount * 4);
      const ConstBuffer aliased{own, kCount};
      self.comm->all_gather({&aliased, 1}, {&symmetric_out, 1}, DType::int32).wait();
      expect_all(whole->data(), "all_gather in place");
      const Buffer both{part->data(), kCount};
      for (int root = 0; root < self.world; ++root) {
        std::memcpy(part->data(), mine.data(), kCount * 4);
        self.comm->broadcast({&both, 1}, DType::int32, root).wait();
        EXPECT_EQ(reinterpret_cast<std::int32_t*>(part->data())[kCount - 1],
                  static_cast<std::int32_t>(kCount - 1) * 10 + root);
      }
    });
}

TEST(cuda_ipc, long_lists_are_one_operation) {
  run_device_world(3, {}, [](DeviceRank& self) {
    std::vector<std::vector<float>> tensors;
    for (std::size_t i = 0; i < 200; ++i) tensors.emplace_back(i % 7 * 100 + i % 3, static_cast<float>(i));
    std::vector<Buffer> buffers;
    for (auto& tensor : tensors) buffers.push_back({tensor.data(), tensor.size()});
    self.comm->all_reduce(buffers, DType::float32, ReduceOp::sum).wait();
    for (std::size_t i = 0; i < tensors.size(); ++i)
      EXPECT_TRUE(tensors[i] == std::vector<float>(tensors[i].size(), static_cast<float>(3 * i)));
  });
}

TEST(cuda_ipc, large_buffers_take_many_steps) {
  run_device_world(2, {.slot_nbytes = 64 << 10}, [](DeviceRank& self) {
    std::vector<std::int64_t> values(1 << 18, self.rank + 1);
    const Buffer buffer{values.data(), values.size()};
    self.comm->all_reduce({&buffer, 1}, DType::int64, ReduceOp::sum).wait();
    EXPECT_TRUE(values == std::vector<std::int64_t>(values.size(), 3));
  });
}

TEST(cuda_ipc, symmetric_memory_is_zero_and_goes_back) {
  run_device_world(2, {.one_device = false}, [](DeviceRank& self) {
    const std::size_t before = self.device->memory().free_nbytes;
    for (int turn = 0; turn < 5; ++turn) {
      auto buffer = self.comm->allocate(1 << 20);
      EXPECT_EQ(buffer->nbytes(), std::size_t{1} << 20);
      EXPECT_TRUE(buffer->data()[0] == std::byte{0} && buffer->data()[(1 << 20) - 1] == std::byte{0});
      EXPECT_TRUE(buffer->peer(1 - self.rank) != buffer->data());
      std::memset(buffer->data(), 1, 1 << 20);
      // Memory dropped in the turn before may be freed only when both ranks have announced it, that is, now.
      EXPECT_EQ(before - self.device->memory().free_nbytes, std::size_t{2} << 20);  // a block of its own
      self.comm->barrier(kBlocking);
    }
    auto kept = self.comm->allocate(100);
    self.comm->close();
    std::memset(kept->data(), 2, 100);  // outlives the communicator
    EXPECT_EQ(self.comm->memory().slot_nbytes, 0u);
  });
}

TEST(cuda_ipc, a_second_communicator_of_the_same_ranks) {
  run_device_world(3, {.max_delay_s = 20e-6}, [](DeviceRank& self) {
    auto second = self.comm->duplicate();
    const auto sum = [&](Communicator& comm) {
      for (int i = 0; i < 20; ++i) {
        float value = 1;
        const Buffer buffer{&value, 1};
        comm.all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum).wait();
        EXPECT_EQ(value, 3.0f);
      }
    };
    std::thread other([&] { sum(*second); });
    sum(*self.comm);
    other.join();
    second->close();
  });
}
