// Checking the other communicators of this process (coll/shm/standstill.hpp).
#include "coll/shm/standstill.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <new>
#include <random>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

constexpr double kFirst_s = 0.5;                         // duration of a wait before anything is published
constexpr auto kSure = std::chrono::milliseconds(1000);  // time for which a standstill must be seen

struct Open {
  std::mutex mutex;
  std::vector<Standstill*> all;
};

Open& open() {
  static auto* const only = new Open;  // a communicator may be closed while the process ends
  // A forked child has none of its parent's; a thread that it lacks may have held the lock.
  static const int has_handler = pthread_atfork(nullptr, nullptr, [] { new (only) Open; });
  static_cast<void>(has_handler);
  return *only;
}

/// Unique on the host for this process and thread.
std::uint64_t mark_of(ThreadId thread) {
  static const std::uint64_t start = std::uint64_t{std::random_device()()} << 32 | std::random_device()();
  // Forked ranks of one parent have its number.
  return mix(mix(start, static_cast<std::uint64_t>(::getpid())), reinterpret_cast<std::uintptr_t>(thread)) | 1;
}

}  // namespace

Standstill::Standstill(const HostMemory& memory, std::function<void(const std::string&)> end)
    : memory_(memory), end_(std::move(end)) {
  const std::lock_guard lock(open().mutex);
  open().all.push_back(this);
}

Standstill::~Standstill() {
  const std::lock_guard lock(open().mutex);
  std::erase(open().all, this);
}

void Standstill::set_callers(const Callers* callers) {
  const std::lock_guard lock(open().mutex);
  callers_ = callers;
  memory_.own().owner.store(mark_of(callers->owner()), std::memory_order_release);
}

bool Standstill::shows_rest(int rank) const {
  const ControlBlock& block = memory_.block(rank);
  return block.rests.load(std::memory_order_acquire) == block.last_entered() + 1;
}

bool Standstill::rests() const {
  const ControlBlock& own = memory_.own();
  return callers_ != nullptr && callers_->rests() && own.closed.load(std::memory_order_acquire) == 0 &&
         memory_.block(0).poison.load() == 0;
}

Signature Standstill::signature_of(int rank) const {
  const ControlBlock& block = memory_.block(rank);
  return block.signatures[block.last_entered() & 1];
}

Standstill::Found Standstill::find(const std::vector<int>& late) const {
  for (const int rank : late) {
    const std::uint64_t peer_mark = memory_.block(rank).owner.load(std::memory_order_acquire);
    if (peer_mark == 0 || !shows_rest(rank)) continue;
    for (const Standstill* other : open().all) {
      const HostMemory& there = other->memory_;
      if (other == this || there.own().owner.load() != memory_.own().owner.load() || !other->shows_rest(there.rank()))
        continue;
      for (int peer = 0; peer < there.world_size(); ++peer) {
        const ControlBlock& block = there.block(peer);
        const std::uint32_t held = block.held.load(std::memory_order_acquire);
        if (peer == there.rank() || block.owner.load(std::memory_order_acquire) != peer_mark || held == 0) continue;
        if (block.last_entered() == held && !reached(there.own().last_entered(), held))
          return {other, rank, peer, memory_.own().last_entered(), held};
      }
    }
  }
  return {};
}

void Standstill::look(const Signature& current, const std::vector<int>& late, double waited_s) {
  if (waited_s < kFirst_s) return;
  const std::unique_lock lock(open().mutex);
  const ThreadId held =
      callers_ == nullptr || memory_.own().owner.load() != mark_of(callers_->owner()) ? nullptr : callers_->held();
  if (held == nullptr) found_ = {};
  const bool may_come = held == nullptr || WorkerLoad::any_left(held);
  memory_.own().held.store(held == nullptr ? 0 : current.sequence, std::memory_order_release);
  for (const Standstill* other : open().all) {
    ControlBlock& own = other->memory_.own();
    if (other == this || own.owner.load() != memory_.own().owner.load()) continue;
    own.rests.store(may_come || !other->rests() ? 0 : own.last_entered() + 1, std::memory_order_release);
  }
  shown_ = true;
  if (may_come) return;
  const Found found = find(late);
  const auto now = Clock::now();
  if (!(found == found_)) since_ = now;
  found_ = found;
  if (found.other == nullptr || now - since_ < kSure) return;
  const std::string mine = text("rank ", memory_.rank(), ": ", describe(current)),
                    theirs = text("rank ", found.rank, ": ", describe(found.other->signature_of(found.peer)));
  const bool first = memory_.rank() < found.rank;
  const std::string message =
      text("ranks called different operations, on two communicators, and wait for each other: ", first ? mine : theirs,
           "; ", first ? theirs : mine);
  end_(message);  // first, because otherwise the rank in the other operation continues, and may enter this one
  found.other->end_(message);
}

void Standstill::withdraw() noexcept {
  if (!shown_) return;
  const std::lock_guard lock(open().mutex);
  shown_ = false;
  found_ = {};
  memory_.own().held.store(0, std::memory_order_release);
  for (const Standstill* other : open().all)
    if (other != this && other->memory_.own().owner.load() == memory_.own().owner.load())
      other->memory_.own().rests.store(0, std::memory_order_release);
}

}  // namespace zcomm::coll
