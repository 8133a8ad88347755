// A device that records all requests (doubles/recorded/trace.hpp) and forwards them to another device.
//
// Invariant: an operation is recorded before it is forwarded, a synchronization after it has returned, so that the
// order in the trace is a possible one. Thread rule: as in device/device.hpp.
#include <map>
#include <mutex>
#include <utility>

#include "base/error.hpp"
#include "doubles/recorded/kernels.hpp"
#include "doubles/recorded/trace.hpp"

namespace zcomm::device {
namespace {

/// The last recorded point, shared by all openers of the event.
struct Mark {
  std::mutex mutex;
  Trace::Point point;
};

class RecordedEvent final : public Event {
 public:
  RecordedEvent(std::unique_ptr<Event> inner, std::shared_ptr<Trace> trace, std::shared_ptr<Mark> mark)
      : inner_(std::move(inner)), trace_(std::move(trace)), mark_(std::move(mark)) {}

  bool done() override {
    const auto point = last();
    return passed(inner_->done(), point);
  }
  void synchronize() override {
    const auto point = last();
    inner_->synchronize();
    passed(true, point);
  }
  bool wait_for(double patience_s) override {
    const auto point = last();
    return passed(inner_->wait_for(patience_s), point);
  }
  SharedHandle handle() override;

  Event& inner() { return *inner_; }
  Trace::Point last() const {
    const std::lock_guard lock(mark_->mutex);
    return mark_->point;
  }
  void set_last(Trace::Point point) {
    const std::lock_guard lock(mark_->mutex);
    mark_->point = std::move(point);
  }

 private:
  bool passed(bool is_done, const Trace::Point& point) {
    if (is_done) trace_->order(point, trace_->host());
    return is_done;
  }

  std::unique_ptr<Event> inner_;
  std::shared_ptr<Trace> trace_;
  std::shared_ptr<Mark> mark_;
};

/// Marks by handle, so that an opener of an event finds its maker's records (within this process).
struct Marks {
  std::mutex mutex;
  std::map<std::array<std::byte, 64>, std::weak_ptr<Mark>> all;
  static Marks& known() {
    static Marks& marks = *new Marks;
    return marks;
  }
};

SharedHandle RecordedEvent::handle() {
  const SharedHandle handle = inner_->handle();
  const std::lock_guard lock(Marks::known().mutex);
  std::erase_if(Marks::known().all, [](const auto& entry) { return entry.second.expired(); });
  Marks::known().all[handle.bytes] = mark_;
  return handle;
}

RecordedEvent& recorded(Event& event) {
  if (auto* const own = dynamic_cast<RecordedEvent*>(&event)) return *own;
  throw InvalidArgument("recorded device: the event was not made by a recorded device");
}

class RecordedStream final : public Stream {
 public:
  /// actor -1: the calling thread.
  RecordedStream(std::unique_ptr<Stream> inner, std::shared_ptr<Trace> trace, Trace::Actor actor)
      : inner_(std::move(inner)),
        trace_(std::move(trace)),
        actor_(actor),
        kernels_(inner_->kernels(),
                 [this](const char* label, const Footprint& footprint) { add_access(label, footprint); }) {}

  void record(Event& event) override {
    RecordedEvent& own = recorded(event);
    own.set_last(trace_->mark(actor()));
    inner_->record(own.inner());
  }
  void wait(Event& event) override {
    RecordedEvent& own = recorded(event);
    const auto point = own.last();
    inner_->wait(own.inner());
    trace_->order(point, actor());
  }
  void copy(void* dst, const void* src, std::size_t nbytes) override {
    add_access("copy", {{Footprint::range(src, nbytes)}, {Footprint::range(dst, nbytes)}});
    inner_->copy(dst, src, nbytes);
  }
  void fill(void* dst, std::uint8_t value, std::size_t nbytes) override {
    add_access("fill", {{}, {Footprint::range(dst, nbytes)}});
    inner_->fill(dst, value, nbytes);
  }
  StreamKernels& kernels() override { return kernels_; }
  bool done() override {
    const auto point = trace_->mark(actor());
    const bool is_done = inner_->done();
    if (is_done) trace_->order(point, trace_->host());
    return is_done;
  }
  void synchronize() override {
    const auto point = trace_->mark(actor());
    inner_->synchronize();
    trace_->order(point, trace_->host());
  }
  std::uintptr_t native() const override { return inner_->native(); }
  bool is_host() const override { return inner_->is_host(); }

  Trace::Actor actor() const { return actor_ < 0 ? trace_->host() : actor_; }

 private:
  void add_access(const char* label, const Footprint& footprint) { trace_->touch(actor(), footprint, label); }

  std::unique_ptr<Stream> inner_;
  std::shared_ptr<Trace> trace_;
  const Trace::Actor actor_;
  RecordedKernels kernels_;
};

class RecordedDevice final : public Device {
 public:
  RecordedDevice(std::shared_ptr<Device> inner, std::shared_ptr<Trace> trace)
      : inner_(std::move(inner)), trace_(std::move(trace)) {}

  const std::string& name() const override { return inner_->name(); }
  std::string uuid() const override { return inner_->uuid(); }
  std::unique_ptr<Stream> make_stream(bool urgent) override {
    auto stream = inner_->make_stream(urgent);
    const std::lock_guard lock(mutex_);
    const auto actor = trace_->add_stream(text("stream ", ++streams_, " of ", name()));
    return std::make_unique<RecordedStream>(std::move(stream), trace_, actor);
  }
  std::unique_ptr<Stream> adopt_stream(std::uintptr_t native) override {
    auto stream = inner_->adopt_stream(native);
    const auto actor = stream->is_host() ? -1 : trace_->queue(text("adopted stream ", native, " of ", name()));
    return std::make_unique<RecordedStream>(std::move(stream), trace_, actor);
  }
  std::unique_ptr<Event> make_event(bool shared) override {
    return std::make_unique<RecordedEvent>(inner_->make_event(shared), trace_, std::make_shared<Mark>());
  }

  Memory allocate(std::size_t nbytes) override {
    Memory memory = inner_->allocate(nbytes);
    const auto range = Footprint::range(memory.get(), nbytes);
    void* const data = memory.get();
    return {data, [memory = std::move(memory), trace = trace_, range](void*) { trace->free(range); }};
  }
  MemoryInfo memory() override { return inner_->memory(); }
  SharedHandle share(const void* data) override { return inner_->share(data); }
  Memory open_memory(const SharedHandle& handle) override { return inner_->open_memory(handle); }
  std::unique_ptr<Event> open_event(const SharedHandle& handle) override {
    std::shared_ptr<Mark> mark;
    {
      const std::lock_guard lock(Marks::known().mutex);
      const auto found = Marks::known().all.find(handle.bytes);
      if (found != Marks::known().all.end()) mark = found->second.lock();
    }
    if (!mark) mark = std::make_shared<Mark>();  // another process's event orders nothing in this trace
    return std::make_unique<RecordedEvent>(inner_->open_event(handle), trace_, std::move(mark));
  }
  void push_current() override { inner_->push_current(); }
  void pop_current() noexcept override { inner_->pop_current(); }
  void lose_after(std::uint64_t n) override { inner_->lose_after(n); }

 private:
  std::shared_ptr<Device> inner_;
  std::shared_ptr<Trace> trace_;
  std::mutex mutex_;
  int streams_ = 0;
};

}  // namespace

std::shared_ptr<Device> record_device(std::shared_ptr<Device> device, std::shared_ptr<Trace> trace) {
  if (!device || !trace) throw InvalidArgument("record_device: no device, or no trace");
  return std::make_shared<RecordedDevice>(std::move(device), std::move(trace));
}

Trace::Actor actor_of(Stream& stream) {
  if (auto* const own = dynamic_cast<RecordedStream*>(&stream)) return own->actor();
  throw InvalidArgument("trace: the stream is not that of a recorded device (record_device)");
}

Trace::Point point_of(Event& event) { return recorded(event).last(); }

}  // namespace zcomm::device
