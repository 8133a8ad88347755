// The simulated device (doubles/simulated/device.hpp).
//
// Each operation of a stream first waits for a random time, so that operations not ordered by events run in any order;
// the thread sanitizer, NaN in fresh memory and the race checker (doubles/recorded/trace.hpp) then reveal a missing
// order. Threads block and never spin. Invariants: a stream runs all its queued operations before it is destroyed,
// unless the device or a point that it waits for is lost. Thread rule: as in device/device.hpp.
#include "doubles/simulated/device.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <random>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "device/kernels_check.hpp"
#include "doubles/simulated/kernels.hpp"
#include "doubles/simulated/state.hpp"

namespace zcomm::device {
namespace {

using simulated::Allocation;
using simulated::Point;
using simulated::SharedEvent;
using simulated::State;

constexpr double kSlice_s = 0.01;  // between two checks for a lost device

[[noreturn]] void throw_endless(const State& state) {
  throw CudaError(text(state.options().name, ": this wait would never end: the stream stands behind an event of a ",
                       "device that is lost; wait with a deadline (Event::wait_for)"));
}

class SimulatedEvent final : public Event {
 public:
  SimulatedEvent(std::shared_ptr<State> state, std::shared_ptr<SharedEvent> event, bool shared)
      : state_(std::move(state)), event_(std::move(event)), shared_(shared) {}

  bool done() override {
    state_->check();
    const auto point = last();
    return !point || point->fate() == Point::Fate::passed;
  }
  void synchronize() override {
    while (!wait_for(kSlice_s))
      if (last()->fate() == Point::Fate::lost) throw_endless(*state_);
  }
  bool wait_for(double patience_s) override {
    state_->check();
    const auto point = last();
    if (!point) return true;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience_s);
    for (;;) {
      const double left_s = std::chrono::duration<double>(end - std::chrono::steady_clock::now()).count();
      const auto fate = point->wait_for(std::clamp(left_s, 0.0, kSlice_s));
      state_->check();
      if (fate == Point::Fate::passed) return true;
      if (left_s <= 0) return false;
      if (fate == Point::Fate::lost)
        std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left_s, kSlice_s)));
    }
  }
  SharedHandle handle() override {
    if (!shared_) throw InvalidArgument("Event::handle: the event was not made with shared");
    return simulated::handle_of(event_);
  }

  std::shared_ptr<Point> last() const {
    const std::lock_guard lock(event_->mutex);
    return event_->last;
  }
  void set_last(std::shared_ptr<Point> point) {
    const std::lock_guard lock(event_->mutex);
    event_->last = std::move(point);
  }

 private:
  std::shared_ptr<State> state_;
  std::shared_ptr<SharedEvent> event_;
  bool shared_;
};

/// The next step of a stream: wait for a point, or run a function; then pass a point. Each of them may be absent.
struct Step {
  std::shared_ptr<Point> waits;
  std::function<void()> run;
  std::shared_ptr<Point> passes;
};

/// Common part of all streams: the calls, but not the thread that runs the steps.
class SimulatedStream : public Stream {
 public:
  explicit SimulatedStream(std::shared_ptr<State> state)
      : state_(std::move(state)),
        random_(state_->options().seed * 1000003 + state_->next_stream()),
        kernels_([this](std::function<void()> run) { put({nullptr, std::move(run), nullptr}); }) {}

  void record(Event& event) override {
    auto point = std::make_shared<Point>();
    put({nullptr, nullptr, point});
    as_simulated(event).set_last(std::move(point));
  }
  void wait(Event& event) override { put({as_simulated(event).last(), nullptr, nullptr}); }
  void copy(void* dst, const void* src, std::size_t nbytes) override {
    check_pointers("copy", dst, src, nbytes);
    if (nbytes == 0) return;
    put({nullptr, [=] { std::memmove(dst, src, nbytes); }, nullptr});
  }
  void fill(void* dst, std::uint8_t value, std::size_t nbytes) override {
    check_pointers("fill", dst, dst, nbytes);
    if (nbytes == 0) return;
    put({nullptr, [=] { std::memset(dst, value, nbytes); }, nullptr});
  }
  StreamKernels& kernels() override { return kernels_; }
  std::uintptr_t native() const override { return 0; }

 protected:
  virtual void carry_out(Step step) = 0;

  /// Returns whether the step was done; false: it will never run.
  bool run(Step& step) noexcept {
    delay();
    bool alive = true;
    while (step.waits && alive && !state_->is_lost()) {
      const auto fate = step.waits->wait_for(kSlice_s);
      alive = fate != Point::Fate::lost;
      if (fate == Point::Fate::passed) break;
    }
    alive = alive && !state_->is_lost();
    if (alive && step.run) {
      try {
        step.run();
      } catch (const std::exception& error) {
        state_->lose(error.what());
        alive = false;
      }
    }
    if (step.passes) step.passes->resolve(alive ? Point::Fate::passed : Point::Fate::lost);
    return alive;
  }

  std::shared_ptr<State> state_;

 private:
  void put(Step step) {
    state_->begin_operation();
    if (state_->options().dry_run) step.run = nullptr;
    carry_out(std::move(step));
  }
  static SimulatedEvent& as_simulated(Event& event) {
    if (auto* const simulated = dynamic_cast<SimulatedEvent*>(&event)) return *simulated;
    throw InvalidArgument("simulated device: the event is of another kind of device");
  }
  void delay() {
    if (state_->options().max_delay_s <= 0) return;
    std::uniform_real_distribution<double> some(0, state_->options().max_delay_s);
    std::this_thread::sleep_for(std::chrono::duration<double>(some(random_)));
  }

  std::mt19937_64 random_;  // of the thread that runs the steps
  SimulatedKernels kernels_;
};

class QueuedStream final : public SimulatedStream {
 public:
  explicit QueuedStream(std::shared_ptr<State> state)
      : SimulatedStream(std::move(state)), thread_([this] { loop(); }) {}
  ~QueuedStream() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  bool done() override {
    state_->check();
    const std::lock_guard lock(mutex_);
    return ran_ == given_;
  }
  void synchronize() override {
    std::unique_lock lock(mutex_);
    const std::uint64_t target = given_;
    changed_.wait(lock, [&] { return ran_ >= target || stuck_; });
    state_->check();
    if (ran_ < target) throw_endless(*state_);
  }

 protected:
  void carry_out(Step step) override {
    const std::lock_guard lock(mutex_);
    steps_.push_back(std::move(step));
    ++given_;
    changed_.notify_all();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closing_ || !steps_.empty(); });
      if (steps_.empty()) return;
      Step step = std::move(steps_.front());
      steps_.pop_front();
      if (stuck_) {
        if (step.passes) step.passes->resolve(Point::Fate::lost);
        continue;
      }
      lock.unlock();
      const bool done = run(step);
      step = {};
      lock.lock();
      stuck_ = !done;
      ran_ += done ? 1 : 0;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Step> steps_;
  std::uint64_t given_ = 0, ran_ = 0;
  bool stuck_ = false, closing_ = false;
  std::thread thread_;
};

/// The calling thread as a stream.
class HostStream final : public SimulatedStream {
 public:
  using SimulatedStream::SimulatedStream;
  bool done() override {
    state_->check();
    return true;
  }
  void synchronize() override { state_->check(); }
  bool is_host() const override { return true; }

 protected:
  void carry_out(Step step) override {
    if (run(step)) return;
    state_->check();
    throw_endless(*state_);
  }
};

class SimulatedDevice final : public Device {
 public:
  explicit SimulatedDevice(const SimulatedOptions& options) : state_(std::make_shared<State>(options)) {}

  const std::string& name() const override { return state_->options().name; }
  std::string uuid() const override { return name(); }
  std::unique_ptr<Stream> make_stream(bool) override {
    state_->check();
    return std::make_unique<QueuedStream>(state_);
  }
  std::unique_ptr<Stream> adopt_stream(std::uintptr_t native) override {
    state_->check();
    if (native != 0)
      throw InvalidArgument(text("simulated device: adopt_stream(", native, "): expected 0, which is the host itself"));
    return std::make_unique<HostStream>(state_);
  }
  std::unique_ptr<Event> make_event(bool shared) override {
    state_->check();
    return std::make_unique<SimulatedEvent>(state_, std::make_shared<SharedEvent>(), shared);
  }

  Memory allocate(std::size_t nbytes) override {
    auto allocation = std::make_shared<Allocation>(state_, nbytes);
    simulated::enlist(allocation);
    std::byte* const data = allocation->data;
    return {std::move(allocation), data};
  }
  MemoryInfo memory() override { return state_->memory(); }
  SharedHandle share(const void* data) override {
    state_->check();
    return simulated::handle_of_memory(data);
  }
  Memory open_memory(const SharedHandle& handle) override {
    state_->check();
    return simulated::find_memory(handle);
  }
  std::unique_ptr<Event> open_event(const SharedHandle& handle) override {
    state_->check();
    return std::make_unique<SimulatedEvent>(state_, simulated::find_event(handle), true);
  }
  void push_current() override {}
  void pop_current() noexcept override {}
  void lose_after(std::uint64_t n) override { state_->lose_after(n); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace

std::shared_ptr<Device> make_simulated_device(const SimulatedOptions& options) {
  if (options.max_delay_s < 0)
    throw InvalidArgument(text("simulated device: max_delay_s=", options.max_delay_s, ": expected 0 or more"));
  return std::make_shared<SimulatedDevice>(options);
}

}  // namespace zcomm::device
