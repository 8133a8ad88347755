// EngineCommunicator: the Communicator (zcomm/communicator.hpp) in front of any Engine.
//
// A facade: each call checks its arguments and becomes an Operation of the executor; the engine does the rest. close()
// frees the engine and its memory; symmetric buffers live as long as their owners.
// [Note: within] While a blocking call waits, signal handlers run on its thread (check_interrupt) and may close the
// communicator, which would wait for that very call. So close() within a call only ends the call, and the call's end
// completes the close. No other collective can start within a call; a message can, because it depends on no order.
// Invariants: after a failure every call throws it; in a forked child every call is refused and nothing is closed.
// Thread rule: free-threaded; ranks must issue their collectives in the same order.
#include "zcomm/communicator.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/interrupt.hpp"
#include "coll/call_scope.hpp"
#include "coll/encoded.hpp"
#include "coll/engine.hpp"
#include "coll/executor.hpp"
#include "coll/failure.hpp"
#include "coll/overlap.hpp"
#include "device/device.hpp"

namespace zcomm::coll {
namespace {

class EngineCommunicator final : public Communicator, private Callers {
 public:
  explicit EngineCommunicator(EngineFactory factory)
      : factory_(std::move(factory)),
        engine_(factory_(symmetric_)),
        rank_(engine_->rank()),
        world_size_(engine_->world_size()),
        own_parts_(engine_->own_parts()),
        codec_refusal_(engine_->codec_refusal()),
        coded_parts_(engine_->coded_parts()),
        encoded_(*engine_),
        compares_behind_(engine_->compares_behind()),
        splits_devices_(engine_->splits()),
        give_up_(std::make_shared<GiveUp>([this](const Completion&) { give_up(); })),
        executor_(std::make_unique<Executor>([this](Operation& operation) { run(operation); }, give_up_)) {
    engine_->set_callers(*this);
  }
  ~EngineCommunicator() override { close(); }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  std::shared_ptr<SymmetricBuffer> allocate(std::size_t nbytes) override { return allocate(nbytes, OpKind::allocate); }
  std::shared_ptr<SymmetricBuffer> allocate_shared(std::size_t nbytes) override {
    return allocate(nbytes, OpKind::allocate_shared);
  }

  Work all_reduce(std::span<const Buffer> buffers, DType dtype, ReduceOp op, const Call& call,
                  const Coding* coding) override {
    return submit({.kind = OpKind::all_reduce,
                   .in = {},
                   .out = buffers,
                   .dtype = dtype,
                   .out_dtype = dtype,
                   .op = op,
                   .call = call,
                   .coding = coding});
  }
  Work reduce(std::span<const Buffer> buffers, DType dtype, ReduceOp op, int root, const Call& call) override {
    return submit({.kind = OpKind::reduce,
                   .in = {},
                   .out = buffers,
                   .dtype = dtype,
                   .out_dtype = dtype,
                   .op = op,
                   .root = root,
                   .call = call});
  }
  Work reduce_scatter(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype, ReduceOp op,
                      DType out_dtype, bool accumulate, const Call& call, std::span<const OwnPart> own,
                      const Coding* coding) override {
    if (!own.empty() && own_parts_ == Engine::OwnParts::refused)
      throw Unsupported("reduce_scatter: own parts of buffers on a device are not served");
    return submit({.kind = OpKind::reduce_scatter,
                   .in = in,
                   .out = out,
                   .dtype = dtype,
                   .out_dtype = out_dtype,
                   .op = op,
                   .accumulate = accumulate,
                   .call = call,
                   .own = own,
                   .coding = coding});
  }
  int coded_parts() const override { return coded_parts_; }
  bool reads_own_parts() const override { return own_parts_ == Engine::OwnParts::read; }
  Work all_gather(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype, const Call& call,
                  const Coding* coding) override {
    return submit({.kind = OpKind::all_gather,
                   .in = in,
                   .out = out,
                   .dtype = dtype,
                   .out_dtype = dtype,
                   .call = call,
                   .coding = coding});
  }
  Work broadcast(std::span<const Buffer> buffers, DType dtype, int root, const Call& call) override {
    return move(OpKind::broadcast, {}, buffers, dtype, root, call);
  }
  Work gather(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype, int root,
              const Call& call) override {
    return move(OpKind::gather, in, out, dtype, root, call);
  }
  Work scatter(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype, int root,
               const Call& call) override {
    return move(OpKind::scatter, in, out, dtype, root, call);
  }
  Work all_to_all(std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype,
                  const Call& call) override {
    return move(OpKind::all_to_all, in, out, dtype, -1, call);
  }
  Work barrier(const Call& call) override { return move(OpKind::barrier, {}, {}, DType::uint8, -1, call); }

  Work after(std::shared_ptr<device::Event> event, const Call& call) override {
    require_usable("after");
    require_outside("after");
    if (!event) throw InvalidArgument("after: no event");
    return start(call, [&] {
      return executor_->submit(
          [&](Operation& operation, SpareItems&) {
            operation.items.clear();
            operation.after = std::move(event);
          },
          call.async);
    });
  }

  Work after(const Work& other, const Call& call) override {
    require_usable("after");
    require_outside("after");
    auto awaited = other.follow();
    if (!awaited) return {};
    return start(call, [&] {
      return executor_->submit(
          [&](Operation& operation, SpareItems&) {
            operation.items.clear();
            operation.awaited = std::move(awaited);
          },
          call.async);
    });
  }

  Work fail(std::string reason) override {
    require_usable("fail");
    require_outside("fail");
    if (reason.empty()) throw InvalidArgument("fail: no reason");
    return executor_->submit(
        [&](Operation& operation, SpareItems&) {
          operation.items.clear();
          operation.reason = std::move(reason);
        },
        true);
  }

  void verify(bool behind) override {
    require_usable("verify");
    require_outside("verify");
    if (!compares_behind_) return;
    start(kBlocking, [&] {
      return executor_->submit(
          [&](Operation& operation, SpareItems&) {
            operation.items.clear();
            operation.verify = behind ? Verify::earlier : Verify::all;
          },
          false);
    });
  }

  Work send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call) override {
    return start<true>(call, [&] {
      check_message("send", "dst", buffers, dst, 0, tag);
      return explained([&] { return engine_->messenger().send(buffers, dtype, dst, tag, call); });
    });
  }
  Work recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call, int* source) override {
    return start<true>(call, [&] {
      check_message("recv", "src", buffers, src, -1, tag);
      check_overlap({.what = "recv",
                     .kind = OpKind::barrier,
                     .in = {},
                     .out = buffers,
                     .in_size = 0,
                     .out_size = size_of(dtype),
                     .rank = rank_});
      return explained([&] { return engine_->messenger().recv(buffers, dtype, src, tag, call, source); });
    });
  }

  std::unique_ptr<Communicator> duplicate() override {
    submit({.kind = OpKind::duplicate, .in = {}, .out = {}, .call = kBlocking});
    auto made = make_communicator(factory_);
    if (explain_) made->describe(in_job_);
    return made;
  }

  bool split_devices(int color, int key, std::shared_ptr<NcclComm>* part) override {
    if (!splits_devices_) return false;
    NcclSplit split{color, key, nullptr};
    submit({.kind = OpKind::duplicate, .in = {}, .out = {}, .call = Call("split of devices", false), .split = &split});
    *part = std::move(split.made);
    return true;
  }

  void forget_callers() noexcept override { called_by_ = By::none; }

  void describe(RanksInJob ranks) override {
    in_job_ = std::move(ranks);
    explain_ = std::make_shared<const Explain>(
        [ranks = in_job_](const std::exception_ptr& error) { return placed(error, ranks); });
  }

  void suspend_deadline() override { suspend(+1); }
  void resume_deadline() override { suspend(-1); }

  CommMemory memory() const override {
    CommMemory memory = symmetric_.memory();
    const auto alive = hold_engine();
    if (rank_ != 0) memory.shared_nbytes = 0;
    memory.slot_nbytes = closed_ ? 0 : engine_->nbytes() + encoded_.nbytes();
    memory.allocation_count += 1;  // control block and slots
    return memory;
  }

  void close() noexcept override {
    if (CallScope::is_in(this)) return close_within();
    const std::lock_guard lock(close_mutex_);
    if (closed_.exchange(true)) return;
    if (is_forked()) return abandon();
    close_engine();
    finish_close();
  }

 private:
  Work submit(const Request& request) {
    require_usable(name_of(request.kind));
    require_outside(name_of(request.kind));
    check(request, rank_, world_size_, symmetric_);
    if (request.coding != nullptr) check_served(request);
    note_caller();
    return start(request.call, [&] {
      return executor_->submit(
          [&](Operation& operation, SpareItems& spares) {
            fill(operation, spares, request, rank_, world_size_, symmetric_);
            operation.async = request.call.async;
            engine_->prepare(operation, request.call);
            if (operation.tail) operation.tail->explain = explain_;
          },
          request.call.async);
    });
  }

  void check_served(const Request& request) const {
    if (codec_refusal_ != nullptr)
      throw Unsupported(text(name_of(request.kind), ": codec ", name_of(request.coding->codec),
                             " is not served by this communicator: ", codec_refusal_));
    check_coding(request, rank_, world_size_, coded_parts_);
  }

  /// Makes a call. If a signal handler has begun to close the communicator within a blocking call, the call completes
  /// the close. With the first template argument the call runs concurrently with the executor, so it holds the engine
  /// itself.
  template <bool beside = false, class Function>
  Work start(const Call& call, const Function& function) {
    struct End {
      EngineCommunicator& self;
      ~End() {
        if (self.is_left_open_.load() && !CallScope::is_in(&self) && self.is_left_open_.exchange(false))
          self.finish_close();
      }
    } const end{*this};
    const auto alive = beside ? hold_engine() : std::shared_lock<std::shared_mutex>();
    if (call.async) return function();
    const CallScope within(this), holding(alive.owns_lock() ? &engine_mutex_ : nullptr);
    try {
      return function();
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      if (!closed_within_) throw;
      throw Error(text(error.what(), "; a signal's handler closed the communicator"));
    }
  }

  /// Keeps the engine alive while the lock is held. A thread that holds it must not lock again.
  std::shared_lock<std::shared_mutex> hold_engine() const {
    return CallScope::is_in(&engine_mutex_) ? std::shared_lock<std::shared_mutex>() : std::shared_lock(engine_mutex_);
  }

  /// See [Note: within].
  void close_within() noexcept {
    if (is_forked() || closed_.exchange(true)) return;
    closed_within_ = is_left_open_ = true;
    close_engine();
    executor_->stop_within(std::make_exception_ptr(Error("communicator was closed before the operation ran")));
  }

  void close_engine() noexcept {
    const std::lock_guard lock(engine_close_mutex_);
    engine_->close();
  }

  void finish_close() noexcept {
    give_up_->detach();
    executor_->stop();
    const std::unique_lock unused(engine_mutex_);  // messages that were under way have ended by now, but not returned
    encoded_.release();
    engine_.reset();
  }

  /// Stops waiting on the program's behalf: ends all pending operations and broadcasts the failure.
  void give_up() noexcept {
    failure_.set(std::make_exception_ptr(Error("an operation was given up (interrupted by a signal)")));
    given_up_ = true;
    close_engine();
  }

  Work move(OpKind kind, std::span<const ConstBuffer> in, std::span<const Buffer> out, DType dtype, int root,
            const Call& call) {
    return submit({.kind = kind, .in = in, .out = out, .dtype = dtype, .out_dtype = dtype, .root = root, .call = call});
  }

  std::shared_ptr<SymmetricBuffer> allocate(std::size_t nbytes, OpKind kind) {
    AllocateResult result;
    submit({.kind = kind, .in = {}, .out = {}, .call = kBlocking, .nbytes = nbytes, .allocate = &result});
    if (result.refused) std::rethrow_exception(result.refused);
    return std::move(result.buffer);
  }

  /// Starts a message. Its errors pass through explain_.
  template <class Start>
  Work explained(const Start& message) {
    if (!explain_) return message();
    try {
      Work work = message();
      work.explain_by(explain_);
      return work;
    } catch (const Interrupted&) {
      throw;
    } catch (const Error&) {
      std::rethrow_exception((*explain_)(std::current_exception()));
    }
  }

  template <class Buffers>
  void check_message(const char* what, const char* peer_word, const Buffers& buffers, int peer, int lowest, int tag) {
    require_usable(what);
    if (peer < lowest || peer >= world_size_ || peer == rank_)
      throw InvalidArgument(
          text(what, ": ", peer_word, "=", peer, ": expected another rank than ", rank_, " in [0, ", world_size_, ")"));
    if (tag < 0) throw InvalidArgument(text(what, ": tag=", tag, ": expected 0 or more"));
    for (std::size_t i = 0; i < buffers.size(); ++i)
      if (buffers[i].data == nullptr && buffers[i].count != 0)
        throw InvalidArgument(text(what, ": buffer ", i, " has ", buffers[i].count, " elements at a null pointer"));
  }

  void require_usable(const char* what) {
    if (is_forked())
      throw Error(text(what, ": this process was forked from rank ", rank_,
                       " after it had joined the job; a forked child cannot use the communicator (start it by spawn)"));
    if (closed_) throw Error(text(what, ": the communicator is closed"));
    failure_.throw_if_set();
  }

  void require_outside(const char* what) const {
    if (CallScope::is_in(this))
      throw Error(text(what, ": this thread is in the middle of another call on this communicator; a signal's handler ",
                       "cannot start an operation on it (close it, or set a flag)"));
  }

  void run(Operation& operation) {
    const auto event = std::exchange(operation.after, nullptr);
    const auto awaited = std::exchange(operation.awaited, nullptr);
    const std::string reason = std::exchange(operation.reason, {});
    const Verify verify = std::exchange(operation.verify, Verify::no);
    const bool is_entry = event || awaited || !reason.empty();
    failure_.throw_if_set();
    try {
      if (event)
        wait_for_device([&](double patience_s) { return event->wait_for(patience_s); });
      else if (awaited)
        wait_for(*awaited);
      else if (!reason.empty())
        fail_with(reason);
      else if (verify != Verify::no)
        engine_->verify(verify == Verify::earlier);
      else
        run_on_engine(operation);
    } catch (const Interrupted&) {
      failed(std::current_exception(), is_entry);
    } catch (...) {
      const auto error = std::current_exception();
      failed(explain_ ? (*explain_)(error) : error, is_entry);
    }
  }

  [[noreturn]] void fail_with(const std::string& reason) {
    engine_->fail(reason);
    throw Error(reason);
  }

  /// Ends an operation, or an entry of after() or fail().
  [[noreturn]] void failed(const std::exception_ptr& error, bool is_entry) {
    if (given_up_) failure_.throw_if_set();
    failure_.set(error);
    if (is_entry) close_engine();  // broadcasts the failure, which a failed operation does itself
    std::rethrow_exception(error);
  }

  void run_on_engine(Operation& operation) {
    const Signature& signature = operation.signature;
    const bool encoded = signature.coding != 0 && !engine_->runs_coded(signature.kind);
    if (own_parts_ == Engine::OwnParts::copied || encoded) bring_home(operation, rank_);
    if (encoded)
      encoded_.run(operation);
    else
      engine_->run(operation);
  }

  static constexpr double kSlice_s = 0.05;  // between looks at signals and at close()

  void check_wait(const char* what) const {
    if (closed_) throw Error(text("after: the communicator was closed before ", what));
    if (given_up_) failure_.throw_if_set();
    check_interrupt();
  }

  /// Waits for another communicator's operation, which ends by itself, at its deadline at the latest.
  /// [Note: deadlines of chains] Ranks that wait for this one meanwhile must not reach their deadline first: they would
  /// name this rank, and not the late one, which only that operation's error names. So an entry that waits for a while
  /// suspends their deadlines, for half as long again as an operation may wait at most: circles of entries end, too.
  void wait_for(Completion& awaited) {
    using Clock = std::chrono::steady_clock;
    DeadlineHold hold(*this);
    const double most_s = engine_->longest_s(), quiet_s = std::min(most_s / 8, 1.0);
    for (const auto start = Clock::now(); !awaited.wait_for(std::min(kSlice_s, quiet_s));) {
      check_wait("the other communicator's operation had ended");
      const double waited_s = std::chrono::duration<double>(Clock::now() - start).count();
      hold.set(waited_s > quiet_s && waited_s < 1.5 * most_s);
    }
    try {
      if (const auto error = awaited.error()) std::rethrow_exception(error);
      if (const auto tail = awaited.tail())
        wait_for_device([&](double patience_s) { return tail->wait_explained(patience_s); });
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      if (closed_ || given_up_) throw;
      constexpr const char* kBefore =
          "after: the operation of another communicator, which this one waits for, failed: ";
      engine_->fail(text(kBefore, error.what()));
      std::rethrow_exception(prefixed(std::current_exception(), kBefore, -1));
    }
  }

  /// Waits for a device. If a rank is lost meanwhile, the operation that needs it notices.
  template <class WaitFor>
  void wait_for_device(const WaitFor& is_done) {
    using Clock = std::chrono::steady_clock;
    const std::chrono::duration<double> timeout(engine_->longest_s());
    for (auto start = Clock::now(); !is_done(kSlice_s);) {
      check_wait("the event was done");
      if (suspensions_.load() > 0) start = Clock::now();
      if (Clock::now() - start >= timeout)
        throw Timeout(text("after: rank ", rank_, " waited ", timeout.count(),
                           " s for an event of its device; the work before it is slow, or the device hangs"));
    }
  }

  void suspend(int by) {
    require_usable("no_deadline");
    const auto alive = hold_engine();
    require_usable("no_deadline");  // still
    count_suspension(by);
  }

  void count_suspension(int by) {
    const std::lock_guard lock(suspend_mutex_);
    engine_->suspend_deadline(suspensions_.fetch_add(by) + by > 0);
  }

  /// A suspension of the thread that runs operations, which keeps the engine alive.
  class DeadlineHold {
   public:
    explicit DeadlineHold(EngineCommunicator& comm) : comm_(comm) {}
    DeadlineHold(const DeadlineHold&) = delete;
    DeadlineHold& operator=(const DeadlineHold&) = delete;
    ~DeadlineHold() { set(false); }
    void set(bool held) noexcept {
      if (held == std::exchange(held_, held)) return;
      try {
        comm_.count_suspension(held ? +1 : -1);
      } catch (...) {  // frames for ranks that cannot be told any more
      }
    }

   private:
    EngineCommunicator& comm_;
    bool held_ = false;
  };

  // --- Callers ---

  ThreadId owner() const override { return owner_; }
  bool rests() const override {
    return called_by_.load(std::memory_order_relaxed) == By::owner && executor_->is_idle();
  }
  ThreadId held() const override {
    if (is_forked()) return nullptr;
    // A thread of the executor's own runs it if neither the owner nor a thread that serves its queue does.
    const ThreadId here = this_thread(), waits = here == owner_ || WorkerLoad::serves() ? here : give_up_->waiting();
    return waits == owner_ || WorkerLoad::is_awaited(waits, owner_) ? waits : nullptr;
  }
  void note_caller() {
    By none = By::none;
    if (called_by_.load(std::memory_order_relaxed) == By::others) return;
    if (this_thread() != owner_ && !WorkerLoad::serves_only(owner_))
      called_by_.store(By::others, std::memory_order_relaxed);
    else if (called_by_.load(std::memory_order_relaxed) == By::none)
      called_by_.compare_exchange_strong(none, By::owner);
  }

  bool is_forked() const { return fork_generation() != generation_; }

  /// In a forked child the threads do not exist and memory belongs to the parent: nothing may be joined, woken or
  /// closed.
  void abandon() noexcept {
    static_cast<void>(engine_.release());
    static_cast<void>(executor_.release());
  }

  const int generation_ = fork_generation();
  const ThreadId owner_ = this_thread();
  enum class By { none, owner, others };  // the owner, or threads that serve only queues of its calls
  std::atomic<By> called_by_{By::none};
  SymmetricMemory symmetric_;
  EngineFactory factory_;
  std::unique_ptr<Engine> engine_;
  const int rank_, world_size_;
  const Engine::OwnParts own_parts_;
  const char* const codec_refusal_;
  const int coded_parts_;
  EncodedCalls encoded_;
  const bool compares_behind_, splits_devices_;
  RanksInJob in_job_;
  std::shared_ptr<const Explain> explain_;  // of the errors of operations; null: ranks have their numbers in the job
  Failure failure_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> closed_within_{false};
  std::atomic<bool> is_left_open_{false};  // closed within a call, which has not ended
  std::atomic<bool> given_up_{false};
  std::mutex close_mutex_, engine_close_mutex_;
  mutable std::shared_mutex engine_mutex_;  // shared by threads that use the engine concurrently with the executor
  std::mutex suspend_mutex_;
  std::atomic<int> suspensions_{0};
  std::shared_ptr<GiveUp> give_up_;
  std::unique_ptr<Executor> executor_;
};

}  // namespace

std::unique_ptr<Communicator> make_communicator(EngineFactory factory) {
  return std::make_unique<EngineCommunicator>(std::move(factory));
}

}  // namespace zcomm::coll
