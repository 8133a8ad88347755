// Races that a recorded device shows: known programs, right and wrong, on the simulated device and the GPU.
#include <thread>

#include "device/devices.hpp"
#include "doubles/recorded/trace.hpp"

namespace zcomm::device {
namespace {

/// A recorded device with two streams, and the memory of an offload: gradient, two slots, staging.
struct Setup {
  explicit Setup(const std::shared_ptr<Device>& inner)
      : trace(std::make_shared<Trace>()), device(record_device(inner, trace)) {
    trace->rename(actor_of(*compute), "compute");
    trace->rename(actor_of(*copy), "copy");
  }
  std::string only() const {
    const auto races = trace->races();
    EXPECT_EQ(races.size(), 1u);
    return races.empty() ? "" : races[0].describe();
  }
  std::shared_ptr<Trace> trace;
  std::shared_ptr<Device> device;
  std::unique_ptr<Stream> compute = device->make_stream(), copy = device->make_stream();
  std::shared_ptr<Event> event = device->make_event();
  Memory gradient = device->allocate(4096), slot = device->allocate(4096);
};

void on_recorded(const std::function<void(Setup&)>& body) {
  // Dry: a race on purpose is none to the thread sanitizer.
  std::vector<std::shared_ptr<Device>> devices = {
      make_simulated_device({.dry_run = true}),
      make_simulated_device({.seed = 7, .max_delay_s = 5e-4, .dry_run = true})};
  if (cuda::available()) devices.push_back(make_cuda_device(0));
  for (const auto& each : devices) {
    Setup setup(each);
    body(setup);
    if (setup.compute) setup.compute->synchronize();  // before memory is freed
    if (setup.copy) setup.copy->synchronize();
  }
}

TEST(trace, what_events_order_is_clean) {
  on_recorded([](Setup& s) {
    const auto back = s.device->make_event();
    for (int i = 0; i < 20; ++i) {
      s.compute->wait(*back);
      s.compute->fill(s.gradient.get(), 1, 4096);
      s.compute->record(*s.event);
      s.copy->wait(*s.event);
      s.copy->copy(s.slot.get(), s.gradient.get(), 4096);
      s.copy->record(*back);
    }
    back->synchronize();
    s.trace->touch(s.trace->host(), {{Footprint::range(s.slot.get(), 4096)}, {}}, "CPU step");
    EXPECT_EQ(s.trace->races().size(), 0u);
    EXPECT_EQ(s.trace->operations(), 41u);
  });
}

TEST(trace, a_missing_wait_is_named_with_its_remedy) {
  on_recorded([](Setup& s) {
    s.trace->set_subject("bucket 3");
    s.compute->fill(s.gradient.get(), 1, 4096);
    s.trace->set_subject("");
    s.compute->record(*s.event);
    s.copy->copy(static_cast<std::byte*>(s.slot.get()), static_cast<std::byte*>(s.gradient.get()) + 1024, 2048);
    const auto races = s.trace->races();
    EXPECT_EQ(races.size(), 1u);
    EXPECT_EQ(races[0].first.label, "fill, bucket 3");
    EXPECT_TRUE(races[0].first.is_write);
    EXPECT_FALSE(races[0].second.is_write);
    EXPECT_EQ(races[0].overlap.end - races[0].overlap.begin, 2048u);
    const std::string message = s.only();
    for (const char* part : {"race on 2048 bytes", "compute writes", "copy reads", "'copy' (operation 1)",
                             "record an event on compute after 'fill, bucket 3' and let copy wait for it"})
      if (message.find(part) == std::string::npos) test::fail(__FILE__, __LINE__, message + " lacks " + part);
  });
}

TEST(trace, an_event_that_was_recorded_too_early_orders_nothing_later) {
  on_recorded([](Setup& s) {
    s.compute->record(*s.event);
    s.compute->fill(s.gradient.get(), 1, 64);
    s.copy->wait(*s.event);
    s.copy->copy(s.slot.get(), s.gradient.get(), 64);
    EXPECT_TRUE(s.only().find("compute writes") != std::string::npos);
  });
}

TEST(trace, a_slot_that_is_filled_again_too_early) {
  on_recorded([](Setup& s) {
    s.compute->copy(s.slot.get(), s.gradient.get(), 64);
    s.compute->record(*s.event);
    s.copy->wait(*s.event);
    s.copy->copy(static_cast<std::byte*>(s.gradient.get()) + 64, s.slot.get(), 64);
    EXPECT_EQ(s.trace->races().size(), 0u);
    s.compute->fill(s.slot.get(), 0, 64);  // write after read
    EXPECT_TRUE(s.only().find("copy reads") != std::string::npos);
  });
}

TEST(trace, the_host_must_synchronize) {
  on_recorded([](Setup& s) {
    const Trace::Actor host = s.trace->host();
    s.copy->fill(s.slot.get(), 1, 64);
    s.copy->record(*s.event);
    s.trace->touch(host, {{Footprint::range(s.slot.get(), 64)}, {}}, "too early");
    EXPECT_TRUE(s.only().find("let the host synchronize an event recorded on copy after 'fill'") != std::string::npos);
    EXPECT_TRUE(s.event->wait_for(60));
    s.trace->touch(host, {{Footprint::range(s.slot.get(), 64)}, {}}, "in time");
    s.copy->fill(s.slot.get(), 1, 64);  // after the host's accesses
    s.copy->synchronize();
    s.trace->touch(host, {{}, {Footprint::range(s.slot.get(), 64)}}, "in time, too");
    while (!s.copy->done()) std::this_thread::yield();
    EXPECT_EQ(s.trace->race_count(), 1u);
  });
}

TEST(trace, memory_that_is_freed_while_in_use) {
  on_recorded([](Setup& s) {
    s.copy->fill(s.slot.get(), 1, 64);
    const auto copy = std::move(s.copy);
    copy->record(*s.event);
    // As the deleter of allocate()'s memory calls it; the memory itself is kept, because the device is not under test.
    s.trace->free(Footprint::range(s.slot.get(), 4096));
    EXPECT_TRUE(s.only().find("the host writes") != std::string::npos);
    EXPECT_TRUE(s.only().find("'free'") != std::string::npos);
    copy->synchronize();
    s.trace->touch(s.trace->queue("other"), {{}, {Footprint::range(s.slot.get(), 64)}}, "new memory");
    EXPECT_EQ(s.trace->race_count(), 1u);
  });
}

TEST(trace, queues_are_ordered_by_word) {
  on_recorded([](Setup& s) {
    const Trace::Actor comm = s.trace->queue("comm"), host = s.trace->host();
    EXPECT_EQ(s.trace->queue("comm"), comm);
    const Footprint slot{{Footprint::range(s.slot.get(), 64)}, {Footprint::range(s.slot.get(), 64)}};
    s.copy->fill(s.slot.get(), 1, 64);
    s.copy->record(*s.event);
    s.trace->order(point_of(*s.event), comm);  // Communicator::after
    s.trace->touch(comm, slot, "reduce_scatter");
    EXPECT_EQ(s.trace->race_count(), 0u);
    s.trace->touch(host, slot, "step");  // without Work::wait
    EXPECT_TRUE(s.only().find("comm") != std::string::npos);
    EXPECT_TRUE(s.trace->races()[0].first.is_write && s.trace->races()[0].second.is_write);
    s.trace->order(comm, host);
    s.trace->touch(host, slot, "step");
    EXPECT_EQ(s.trace->race_count(), 1u);
  });
}

TEST(trace, host_threads_are_ordered_by_word) {
  on_recorded([](Setup& s) {
    const Footprint slot{{}, {Footprint::range(s.slot.get(), 64)}};
    s.trace->touch(s.trace->host(), slot, "main");
    const auto handed_over = s.trace->mark(s.trace->host());
    std::thread([&] {
      s.trace->order(handed_over, s.trace->host());
      s.trace->touch(s.trace->host(), slot, "other");
    }).join();
    EXPECT_EQ(s.trace->race_count(), 0u);
    s.trace->touch(s.trace->host(), slot, "main again");
    EXPECT_TRUE(s.only().find("order()") != std::string::npos);
  });
}

TEST(trace, kernels_touch_what_they_touch) {
  on_recorded([](Setup& s) {
    auto* const gradient = static_cast<float*>(s.gradient.get());
    auto* const slot = static_cast<float*>(s.slot.get());
    void* const dst[] = {slot};
    const void* const src[] = {gradient, gradient + 16};
    s.compute->kernels().reduce({dst, src, 16, DType::float32, DType::float32, ReduceOp::sum});
    s.copy->fill(gradient + 32, 0, 64);  // adjacent bytes
    EXPECT_EQ(s.trace->race_count(), 0u);
    s.copy->fill(gradient + 31, 0, 4);
    EXPECT_EQ(s.trace->race_count(), 1u);
    s.copy->copy(gradient + 40, slot, 4);
    EXPECT_EQ(s.trace->race_count(), 2u);
    s.compute->kernels().reduce({dst, src, 16, DType::float32, DType::float32, ReduceOp::sum, true});
    EXPECT_EQ(s.trace->race_count(), 4u);  // its source, and its result
    s.compute->kernels().cast(gradient + 100, DType::bfloat16, slot, DType::float32, 16);
    s.copy->fill(gradient + 107, 0, 8);  // bytes 28 to 36 of 32
    EXPECT_EQ(s.trace->race_count(), 5u);
    EXPECT_EQ(s.trace->races().back().overlap.end - s.trace->races().back().overlap.begin, 4u);
    s.compute->kernels().scale({.dst = gradient + 200,
                                .dst_dtype = DType::float32,
                                .src = slot,
                                .src_dtype = DType::float32,
                                .count = 16,
                                .factor = 2});
    s.copy->fill(gradient + 215, 0, 8);  // a task of no name to the recorder
    EXPECT_EQ(s.trace->race_count(), 6u);
    const Race last = s.trace->races().back();
    EXPECT_EQ(last.first.label, "scale");
  });
}

TEST(trace, adopted_streams_are_one_and_the_host_is_the_host) {
  Setup s(make_simulated_device());
  const auto own = s.device->adopt_stream(0);
  EXPECT_EQ(actor_of(*own), s.trace->host());
  own->fill(s.slot.get(), 0, 64);
  s.trace->touch(s.trace->host(), {{}, {Footprint::range(s.slot.get(), 64)}}, "on the host");
  s.copy->fill(s.slot.get(), 0, 64);
  s.copy->record(*s.event);
  own->wait(*s.event);
  own->fill(s.slot.get(), 0, 64);
  EXPECT_EQ(s.trace->race_count(), 0u);
}

TEST(trace, shared_events_order_ranks_that_are_threads) {
  const auto trace = std::make_shared<Trace>();
  const auto first = record_device(make_simulated_device({.seed = 1, .max_delay_s = 1e-4}), trace);
  const auto second = record_device(make_simulated_device({.seed = 2, .max_delay_s = 1e-4}), trace);
  const auto memory = first->allocate(64);
  const auto event = first->make_event(true);
  const auto writer = first->make_stream(), reader = second->make_stream();
  const auto memory_handle = first->share(memory.get()), event_handle = event->handle();
  writer->fill(memory.get(), 1, 64);
  writer->record(*event);
  std::vector<std::byte> result(64);
  std::thread([&] {
    const auto opened = second->open_memory(memory_handle);
    const auto same = second->open_event(event_handle);
    reader->wait(*same);
    reader->copy(result.data(), opened.get(), 64);
    reader->synchronize();
  }).join();
  EXPECT_EQ(trace->race_count(), 0u);
  writer->fill(memory.get(), 2, 64);
  EXPECT_EQ(trace->race_count(), 1u);
  writer->synchronize();
}

TEST(trace, what_is_not_recorded_is_refused) {
  Setup s(make_simulated_device());
  const auto plain = make_simulated_device();
  const auto event = plain->make_event();
  EXPECT_THROW_WITH(s.copy->wait(*event), InvalidArgument, "recorded device");
  EXPECT_THROW_WITH(plain->make_stream()->wait(*s.event), InvalidArgument, "another kind");
  EXPECT_THROW_WITH(actor_of(*plain->make_stream()), InvalidArgument, "record_device");
  EXPECT_THROW(record_device(nullptr, s.trace), InvalidArgument);
}

}  // namespace
}  // namespace zcomm::device
