// Features of only the simulated device: budgets, seeded delays, loss seen from another rank, handles within a process.
#include <algorithm>
#include <cmath>
#include <thread>

#include "device/devices.hpp"

namespace zcomm::device {
namespace {

using test::OnDevice;

TEST(simulated, a_budget_of_memory) {
  const auto device = make_simulated_device({.memory_nbytes = 10 << 20, .name = "simulated:1"});
  auto first = device->allocate(6 << 20);
  EXPECT_EQ(device->memory().free_nbytes, 4u << 20);
  EXPECT_THROW_WITH(device->allocate(5 << 20), CudaError, "simulated:1: out of memory: asked for 5.00 MiB, 4.00 MiB");
  EXPECT_THROW_WITH(device->allocate(5 << 20), CudaError, "10.00 MiB are free, 6.00 MiB in use");
  EXPECT_THROW_WITH(device->allocate(5 << 20), CudaError, "offload more");
  first.reset();
  device->allocate(10 << 20);
}

TEST(simulated, fresh_memory_is_nan) {
  const auto device = make_simulated_device();
  const auto memory = device->allocate(64);
  const auto* const values = static_cast<const float*>(memory.get());
  EXPECT_TRUE(std::all_of(values, values + 16, [](float x) { return std::isnan(x); }));
}

/// How often the reader's point was passed before the writer's, which was queued first.
int overtakings(std::uint64_t seed, bool with_event) {
  const auto device = make_simulated_device({.seed = seed, .max_delay_s = 1e-3});
  const auto writer = device->make_stream(), reader = device->make_stream();
  const auto written = device->make_event(), read = device->make_event();
  int count = 0;
  for (int i = 0; i < 10; ++i) {
    writer->record(*written);
    if (with_event) reader->wait(*written);
    reader->record(*read);
    read->synchronize();
    count += written->done() ? 0 : 1;
    writer->synchronize();
  }
  return count;
}

TEST(simulated, delays_show_what_is_not_ordered) {
  int count = 0;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_EQ(overtakings(seed, true), 0);
    count += overtakings(seed, false);
  }
  EXPECT_GT(count, 0);
}

TEST(simulated, the_host_as_a_stream) {
  const auto device = make_simulated_device({.seed = 3, .max_delay_s = 1e-3});
  const auto host = device->adopt_stream(0), stream = device->make_stream();
  EXPECT_TRUE(host->is_host());
  EXPECT_FALSE(stream->is_host());
  const auto event = device->make_event();
  std::vector<int> from(100, 4), to(100, 0);
  for (int i = 0; i < 10; ++i) stream->copy(to.data(), from.data(), 400);
  stream->record(*event);
  host->wait(*event);
  EXPECT_TRUE(to == from);  // wait has blocked
  host->fill(to.data(), 0, 400);
  EXPECT_EQ(to[99], 0);  // it has run
  EXPECT_TRUE(host->done());
  EXPECT_THROW_WITH(device->adopt_stream(64), InvalidArgument, "expected 0");
}

TEST(simulated, ranks_that_are_threads_share_memory_and_events) {
  const auto first = make_simulated_device({.seed = 1, .max_delay_s = 1e-3});
  const auto second = make_simulated_device({.seed = 2, .max_delay_s = 1e-3});
  auto memory = first->allocate(1024);
  const auto event = first->make_event(true);
  const SharedHandle memory_handle = first->share(static_cast<std::byte*>(memory.get()) + 24);
  const SharedHandle event_handle = event->handle();
  EXPECT_EQ(memory_handle.offset, 24u);
  EXPECT_TRUE(event->handle().bytes == event_handle.bytes);

  const auto writer = first->make_stream();
  writer->fill(memory.get(), 17, 1024);
  writer->record(*event);
  std::thread other([&] {
    const auto reader = second->make_stream();
    const auto opened = second->open_memory(memory_handle);
    const auto same = second->open_event(event_handle);
    std::vector<std::uint8_t> result(1000);
    reader->wait(*same);
    reader->copy(result.data(), opened.get(), 1000);
    reader->synchronize();
    EXPECT_TRUE(result == std::vector<std::uint8_t>(1000, 17));
    EXPECT_TRUE(same->done());
  });
  other.join();
}

TEST(simulated, handles_of_what_is_not_there) {
  const auto device = make_simulated_device();
  int x = 0;
  EXPECT_THROW_WITH(device->share(&x), InvalidArgument, "allocate()");
  auto memory = device->allocate(8);
  auto event = device->make_event(true);
  SharedHandle of_memory = device->share(memory.get()), of_event = event->handle();
  EXPECT_THROW_WITH(device->open_event(of_memory), InvalidArgument, "not a handle of an event");
  EXPECT_THROW_WITH(device->open_memory(of_event), InvalidArgument, "not a handle of memory");
  memory.reset();
  event.reset();
  EXPECT_THROW_WITH(device->open_memory(of_memory), InvalidArgument, "freed");
  EXPECT_THROW_WITH(device->open_event(of_event), InvalidArgument, "gone");
  of_event.bytes[8] ^= std::byte{1};
  EXPECT_THROW_WITH(device->open_event(of_event), Unsupported, "of process");
}

TEST(simulated, who_waits_for_a_lost_device_is_not_kept_for_ever) {
  const auto lost = make_simulated_device({.seed = 5, .max_delay_s = 1e-3}), well = make_simulated_device();
  const auto event = lost->make_event(true);
  const auto theirs = lost->make_stream();
  for (int i = 0; i < 100; ++i) theirs->record(*event);
  const auto same = well->open_event(event->handle());
  const auto stream = well->make_stream(), after = well->make_stream();
  const auto passed = well->make_event();
  stream->wait(*same);
  stream->record(*passed);
  after->wait(*passed);
  lost->lose_after(1);
  EXPECT_THROW(theirs->record(*event), CudaError);
  EXPECT_FALSE(passed->wait_for(0.02));  // the other device is well, and waits
  EXPECT_FALSE(stream->done());
  EXPECT_THROW_WITH(passed->synchronize(), CudaError, "never end");
  EXPECT_THROW_WITH(stream->synchronize(), CudaError, "never end");
  EXPECT_THROW_WITH(well->adopt_stream(0)->wait(*same), CudaError, "never end");
  well->make_stream()->synchronize();  // other streams continue
}

TEST(simulated, a_wait_with_a_deadline) {
  const auto device = make_simulated_device({.seed = 1, .max_delay_s = 1e-2});
  const auto stream = device->make_stream();
  const auto event = device->make_event();
  for (int i = 0; i < 20; ++i) stream->record(*event);
  EXPECT_FALSE(event->wait_for(0));
  EXPECT_TRUE(event->wait_for(60));
  EXPECT_TRUE(event->done());
}

TEST(simulated, two_streams_from_two_threads) {
  const auto device = make_simulated_device({.seed = 9, .max_delay_s = 1e-4});
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      const auto stream = device->make_stream();
      std::vector<int> from(64, t), to(64, -1);
      for (int i = 0; i < 20; ++i) stream->copy(to.data(), from.data(), 256);
      stream->synchronize();
      EXPECT_TRUE(to == from);
    });
  for (auto& thread : threads) thread.join();
}

TEST(simulated, a_dry_run_touches_nothing) {
  const auto device = make_simulated_device({.dry_run = true});
  const auto stream = device->make_stream();
  stream->fill(reinterpret_cast<void*>(4096), 1, 64);
  stream->synchronize();
  EXPECT_TRUE(stream->done());
}

TEST(simulated, options_are_checked) {
  EXPECT_THROW_WITH(make_simulated_device({.max_delay_s = -1}), InvalidArgument, "max_delay_s=-1");
}

}  // namespace
}  // namespace zcomm::device
