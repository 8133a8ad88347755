#include "cuda_emulation/grid.hpp"

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace zcomm::emulation {
namespace {

constexpr std::size_t kStackNbytes = 128 << 10;
constexpr unsigned kWarp = 32;

/// A barrier of threads. No thread can return before all have left, because each must first arrive again.
struct Meeting {
  unsigned generation = 0, arrived = 0;
  std::uint64_t given[kWarp] = {}, result[kWarp] = {};
};

using Stack = std::unique_ptr<std::byte[]>;

/// Kept from block to block.
class Stacks {
 public:
  Stack take() {
    if (spare_.empty()) return std::make_unique<std::byte[]>(kStackNbytes);
    Stack stack = std::move(spare_.back());
    spare_.pop_back();
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack.get(), kStackNbytes);  // frames that were left, not returned from
#endif
    return stack;
  }
  void give(Stack stack) { spare_.push_back(std::move(stack)); }

 private:
  std::vector<Stack> spare_;
};

Stacks& stacks() {
  static thread_local Stacks mine;
  return mine;
}

/// Threads on a stack of their own; the sanitizers are notified of each switch.
struct Fiber {
  Fiber() : stack(stacks().take()) {}
  ~Fiber() { stacks().give(std::move(stack)); }
  ucontext_t context{};
  Stack stack;
  const Meeting* waits_for = nullptr;
  unsigned generation = 0;  // of the meeting, when it began to wait
  unsigned thread = 0;
  bool finished = false;
#if defined(__SANITIZE_THREAD__)
  void* tsan = nullptr;
#endif
  bool blocked() const { return waits_for != nullptr && waits_for->generation == generation; }
};

class Block {
 public:
  Block(unsigned threads, bool backwards, const std::function<void()>& body)
      : threads_(threads), backwards_(backwards), body_(body), warps_((threads + kWarp - 1) / kWarp) {}

  void run() {
    current_ = this;
    while (next_ < threads_ || live_ > 0) {
      bool moved = false;
      for (std::size_t i = 0; i < fibers_.size(); ++i)
        if (!fibers_[i]->finished && !fibers_[i]->blocked()) resume(*fibers_[i]), moved = true;
      if (next_ < threads_) start(), moved = true;
      if (!moved) {
        std::fprintf(stderr, "cuda_emulation: %u threads of block %u wait for one that does not come\n", live_,
                     blockIdx.x);
        std::abort();
      }
    }
    current_ = nullptr;
  }

  /// Of the running thread. needed: how many meet.
  const std::uint64_t* meet(Meeting& meeting, unsigned needed, unsigned lane, std::uint64_t value) {
    meeting.given[lane] = value;
    if (++meeting.arrived == needed) {
      std::copy_n(meeting.given, kWarp, meeting.result);
      std::fill_n(meeting.given, kWarp, 0);
      meeting.arrived = 0;
      ++meeting.generation;
      return meeting.result;
    }
    running_->waits_for = &meeting;
    running_->generation = meeting.generation;
    switch_to_scheduler(*running_);
    return meeting.result;
  }

  static Block* current() { return current_; }
  Meeting& warp() { return warps_[thread_ / kWarp]; }
  Meeting& whole() { return whole_; }
  unsigned thread() const { return thread_; }
  unsigned threads() const { return threads_; }

 private:
  void start() {
    Fiber& fiber = *fibers_.emplace_back(std::make_unique<Fiber>());
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackNbytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &Block::entry, 0);
#if defined(__SANITIZE_THREAD__)
    fiber.tsan = __tsan_create_fiber(0);
#endif
    ++live_;
    resume(fiber);
  }

  /// Runs threads that have not begun until none is left, or one of them waits.
  static void entry() {
    Block& block = *current_;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_nbytes_);
#endif
    Fiber& mine = *block.running_;
    while (block.next_ < block.threads_) {
      const unsigned turn = block.next_++;
      mine.thread = block.backwards_ ? block.threads_ - 1 - turn : turn;
      block.enter(mine.thread);
      block.body_();
    }
    mine.finished = true;
    --block.live_;
    block.switch_to_scheduler(mine);
  }

  void enter(unsigned thread) {
    thread_ = thread;
    threadIdx = {thread, 0, 0};
  }

  void resume(Fiber& fiber) {
    running_ = &fiber;
    fiber.waits_for = nullptr;
    enter(fiber.thread);
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), kStackNbytes);
#endif
#if defined(__SANITIZE_THREAD__)
    scheduler_tsan_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber.tsan, 0);
#endif
    swapcontext(&scheduler_, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
#if defined(__SANITIZE_THREAD__)
    if (fiber.finished) __tsan_destroy_fiber(fiber.tsan);
#endif
  }

  void switch_to_scheduler(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(fiber.finished ? nullptr : &fake, scheduler_stack_, scheduler_nbytes_);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(scheduler_tsan_, 0);
#endif
    swapcontext(&fiber.context, &scheduler_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, &scheduler_stack_, &scheduler_nbytes_);
#endif
  }

  static thread_local Block* current_;
  unsigned threads_, next_ = 0, live_ = 0, thread_ = 0;
  bool backwards_;
  const std::function<void()>& body_;
  std::vector<Meeting> warps_;
  Meeting whole_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* running_ = nullptr;
  ucontext_t scheduler_{};
#if defined(__SANITIZE_ADDRESS__)
  const void* scheduler_stack_ = nullptr;
  std::size_t scheduler_nbytes_ = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* scheduler_tsan_ = nullptr;
#endif
};

thread_local Block* Block::current_ = nullptr;

}  // namespace

void run_grid(Index grid, Index block, const std::function<void()>& thread) {
  static thread_local bool backwards = false;
  backwards = !backwards;
  blockDim = block;
  gridDim = grid;
  for (unsigned turn = 0; turn < grid.x; ++turn) {
    blockIdx = {backwards ? grid.x - 1 - turn : turn, 0, 0};
    Block(block.x, backwards, thread).run();
  }
}

const std::uint64_t* exchange(std::uint32_t mask, std::uint64_t value) {
  Block& block = *Block::current();
  const unsigned lane = block.thread() % kWarp;
  if ((mask >> lane & 1u) == 0) {
    std::fprintf(stderr, "cuda_emulation: lane %u is not in its own mask %08x\n", lane, mask);
    std::abort();
  }
  return block.meet(block.warp(), static_cast<unsigned>(__builtin_popcount(mask)), lane, value);
}

void meet_block() {
  Block& block = *Block::current();
  block.meet(block.whole(), block.threads(), 0, 0);
}

}  // namespace zcomm::emulation
