// Streams, events and memory: the same bodies on each device (devices.hpp).
#include "device/devices.hpp"

namespace zcomm::device {
namespace {

using test::on_devices;
using test::OnDevice;

std::vector<int> numbers(std::size_t count, int first) {
  std::vector<int> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = first + static_cast<int>(i);
  return all;
}

TEST(device, a_stream_runs_in_order) {
  on_devices([](Device& device) {
    const auto stream = device.make_stream(true);
    OnDevice<int> a(device, numbers(1000, 5)), b(device, 1000);
    for (int i = 0; i < 20; ++i) {
      stream->fill(b.data(), 0, 4000);
      stream->copy(b.data(), a.data(), 4000);
    }
    stream->synchronize();
    EXPECT_TRUE(stream->done());
    EXPECT_TRUE(b.get() == numbers(1000, 5));
  });
}

TEST(device, events_order_streams) {
  on_devices([](Device& device) {
    const auto first = device.make_stream(), second = device.make_stream();
    const auto filled = device.make_event(), taken = device.make_event();
    OnDevice<int> source(device, 256), slot(device, 256);
    std::vector<OnDevice<int>> results;
    for (int i = 0; i < 12; ++i) results.emplace_back(device, 256);
    std::vector<OnDevice<int>> inputs;
    for (int i = 0; i < 12; ++i) inputs.emplace_back(device, numbers(256, i));
    for (std::size_t i = 0; i < 12; ++i) {  // one slot, filled by one stream and emptied by the other
      first->wait(*taken);                  // done while it has not been recorded
      first->copy(slot.data(), inputs[i].data(), 1024);
      first->record(*filled);
      second->wait(*filled);
      second->copy(results[i].data(), slot.data(), 1024);
      second->record(*taken);
    }
    taken->synchronize();
    EXPECT_TRUE(taken->done());
    EXPECT_TRUE(filled->done());
    for (std::size_t i = 0; i < 12; ++i) EXPECT_TRUE(results[i].get() == numbers(256, static_cast<int>(i)));
  });
}

TEST(device, an_event_that_was_never_recorded_is_done) {
  on_devices([](Device& device) {
    const auto event = device.make_event();
    EXPECT_TRUE(event->done());
    event->synchronize();
    EXPECT_TRUE(event->wait_for(0));
    const auto stream = device.make_stream();
    stream->wait(*event);
    stream->synchronize();
  });
}

TEST(device, a_wait_is_for_the_point_that_was_recorded_last) {
  on_devices([](Device& device) {
    const auto fast = device.make_stream(), slow = device.make_stream(), third = device.make_stream();
    const auto event = device.make_event();
    OnDevice<int> from(device, numbers(4096, 3)), middle(device, 4096), to(device, 4096);
    for (int i = 0; i < 30; ++i) slow->fill(middle.data(), 1, 4096 * 4);
    slow->copy(middle.data(), from.data(), 4096 * 4);
    slow->record(*event);
    third->wait(*event);
    fast->record(*event);  // passes first: must not free the stream that waits for the point before
    third->copy(to.data(), middle.data(), 4096 * 4);
    third->synchronize();
    EXPECT_TRUE(to.get() == numbers(4096, 3));
  });
}

TEST(device, events_and_streams_may_go_before_their_work_is_done) {
  on_devices([](Device& device) {
    OnDevice<int> a(device, numbers(1000, 1)), b(device, 1000);
    const auto last = device.make_stream();
    {
      const auto stream = device.make_stream();
      const auto event = device.make_event();
      for (int i = 0; i < 10; ++i) stream->copy(b.data(), a.data(), 4000);
      stream->record(*event);
      last->wait(*event);
    }
    last->synchronize();
    EXPECT_TRUE(b.get() == numbers(1000, 1));
  });
}

TEST(device, the_adopted_default_stream) {
  on_devices([](Device& device) {
    const auto own = device.adopt_stream(0), other = device.make_stream();
    const auto event = device.make_event();
    OnDevice<int> a(device, numbers(500, 9)), b(device, 500), c(device, 500);
    other->copy(b.data(), a.data(), 2000);
    other->record(*event);
    own->wait(*event);
    own->copy(c.data(), b.data(), 2000);
    own->synchronize();
    EXPECT_TRUE(own->done());
    EXPECT_TRUE(c.get() == numbers(500, 9));
  });
}

TEST(device, memory_is_aligned_and_counted) {
  on_devices([](Device& device) {
    const auto before = device.memory();
    EXPECT_LE(before.free_nbytes, before.total_nbytes);
    std::vector<Memory> all;
    for (const std::size_t nbytes : {1u, 300u, 4096u, 1u << 20}) all.push_back(device.allocate(nbytes));
    for (const auto& memory : all) EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 256, 0u);
    EXPECT_LE(device.memory().free_nbytes, before.free_nbytes);
  });
}

TEST(device, more_memory_than_there_is) {
  on_devices([](Device& device) {
    const std::size_t too_much = device.memory().total_nbytes + (std::size_t{1} << 46);
    EXPECT_THROW_WITH(device.allocate(too_much), CudaError, "out of memory: asked for");
    device.allocate(64);  // the error concerned one call
  });
}

TEST(device, kernels_are_put_on_the_stream) {
  on_devices([](Device& device) {
    const auto stream = device.make_stream();
    OnDevice<float> a(device, std::vector<float>(777, 1.5f)), b(device, std::vector<float>(777, 2.0f)),
        sum(device, 777);
    OnDevice<std::uint16_t> half(device, 777);
    {
      void* const dst[] = {sum.data()};
      const void* const src[] = {a.data(), b.data()};
      stream->kernels().reduce({dst, src, 777, DType::float32, DType::float32, ReduceOp::sum});
    }  // arguments have been copied
    stream->kernels().cast(half.data(), DType::bfloat16, sum.data(), DType::float32, 777);
    stream->synchronize();
    EXPECT_TRUE(sum.get() == std::vector<float>(777, 3.5f));
    EXPECT_TRUE(half.get() == std::vector<std::uint16_t>(777, 0x4060));
    stream->kernels().cast(nullptr, DType::bfloat16, nullptr, DType::float32, 0);
  });
}

TEST(device, bad_arguments_are_refused_at_once) {
  on_devices([](Device& device) {
    const auto stream = device.make_stream();
    int x = 0;
    EXPECT_THROW_WITH(stream->copy(nullptr, &x, 4), InvalidArgument, "dst is null");
    EXPECT_THROW_WITH(stream->copy(&x, nullptr, 4), InvalidArgument, "src is null");
    EXPECT_THROW_WITH(stream->fill(nullptr, 1, 4), InvalidArgument, "dst is null");
    stream->copy(nullptr, nullptr, 0);
    std::vector<const void*> src(kMaxKernelBuffers + 1, &x);
    void* const dst[] = {&x};
    EXPECT_THROW_WITH(stream->kernels().reduce({dst, src, 1, DType::float32, DType::float32, ReduceOp::sum}),
                      InvalidArgument, " src; expected at most");
    EXPECT_THROW_WITH(stream->kernels().cast(&x, DType::int32, &x, DType::float32, 1), InvalidArgument, "to int32");
    const auto event = device.make_event();
    EXPECT_THROW_WITH(event->handle(), InvalidArgument, "shared");
    stream->synchronize();
  });
}

TEST(device, what_is_lost_says_so_in_each_later_call) {
  on_devices([](Device& device) {
    const auto stream = device.make_stream();
    const auto event = device.make_event();
    auto memory = device.allocate(256);
    device.lose_after(3);
    stream->fill(memory.get(), 1, 256);
    stream->record(*event);
    EXPECT_THROW_WITH(stream->fill(memory.get(), 2, 256), CudaError, "the GPU is lost");
    EXPECT_THROW_WITH(stream->record(*event), CudaError, "restart the process");
    EXPECT_THROW_WITH(stream->wait(*event), CudaError, "xid");
    EXPECT_THROW(stream->synchronize(), CudaError);
    EXPECT_THROW(stream->done(), CudaError);
    EXPECT_THROW(event->synchronize(), CudaError);
    EXPECT_THROW(event->done(), CudaError);
    EXPECT_THROW(event->wait_for(1), CudaError);
    EXPECT_THROW(device.make_stream(), CudaError);
    EXPECT_THROW(device.make_event(), CudaError);
    EXPECT_THROW(device.allocate(8), CudaError);
    EXPECT_THROW(device.memory(), CudaError);
    device.lose_after(0);
  });
}

}  // namespace
}  // namespace zcomm::device
