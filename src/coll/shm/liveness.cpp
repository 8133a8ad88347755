// Waiting while watching the other ranks (coll/shm/liveness.hpp).
#include "coll/shm/liveness.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "base/notices.hpp"

namespace zcomm::coll {

using net::Cause;
using net::Fate;

namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);  // the cost of a lost wake-up or an unseen loss

// cause, rank that noticed, rank that failed: 8 + 12 + 12 bits.
constexpr std::uint32_t kRankLimit = 1u << 12;

std::uint32_t encode(int cause, int noticed_by, int rank) {
  return static_cast<std::uint32_t>(cause) << 24 | static_cast<std::uint32_t>(noticed_by) << 12 |
         static_cast<std::uint32_t>(rank);
}

std::string join(const std::vector<int>& ranks) {
  std::string joined;
  for (const int rank : ranks) joined += text(joined.empty() ? "" : ", ", rank);
  return joined;
}

const char* waiting_for(Stage stage) {
  static constexpr const char* words[] = {"to enter it", "to bring its data", "to reduce its chunk",
                                          "to take its results", "to finish it"};
  return words[static_cast<int>(stage)];
}

}  // namespace

Liveness::Liveness(std::shared_ptr<net::Mesh> mesh, const HostMemory& memory, const WaitTimes& times)
    : mesh_(std::move(mesh)),
      memory_(memory),
      patience_(Patience::of(memory.world_size(), memory.cpu_count())),
      clock_(times),
      standstill_(memory, [this](const std::string& message) { end_standstill(message); }) {
  if (static_cast<std::uint32_t>(memory.world_size()) > kRankLimit)
    throw InvalidArgument(text("world_size=", memory.world_size(), ": at most ", kRankLimit, " ranks on one host"));
  callback_ = mesh_->on_loss([this](net::Loss loss) {
    // A goodbye matters only to a rank that waits for the leaver; it finds out when it looks around.
    if (loss.fate == Fate::died) poison(Cause::died, loss.rank);
    memory_.wake_all();
  });
  if (const auto loss = mesh_->lost(); loss && loss->fate == Fate::died) poison(Cause::died, loss->rank);
}

Liveness::~Liveness() { mesh_->forget(callback_); }

void Liveness::begin(const Signature& signature) {
  current_ = &signature;
  has_deadline_ = false;
  warned_of_.clear();
  if (closing_) throw Error(text("communicator was closed before ", describe(signature), " ran"));
  throw_if_poisoned();
}

void Liveness::restart_clock() {
  has_deadline_ = true;
  clock_.start(Clock::now());
}

bool Liveness::is_suspended(int rank) const {
  return memory_.block(rank).suspended.load(std::memory_order_acquire) != 0;
}

void Liveness::suspend_deadline(bool suspended) noexcept {
  memory_.own().suspended.store(suspended, std::memory_order_release);
}

void Liveness::wait(Stage stage, int peer, std::uint32_t target) {
  Signal& signal = memory_.block(peer).signal(stage, target);
  if (!wait_awake(signal, target, patience_)) {
    if (!has_deadline_) restart_clock();
    struct End {
      Standstill& standstill;
      ~End() { standstill.withdraw(); }
    } const end{standstill_};
    while (!wait_asleep(signal, target, std::min(clock_.next(), Clock::now() + kSlice)))
      look_around(stage, peer, target);
  }
  if (!warned_of_.empty()) log_arrival();
}

void Liveness::wait_for_peers(Stage stage, std::uint32_t target) {
  for (int peer = 0; peer < memory_.world_size(); ++peer)
    if (peer != memory_.rank()) wait(stage, peer, target);
}

void Liveness::look_around(Stage stage, int peer, std::uint32_t target) {
  if (closing_) throw Error(text("communicator was closed while ", during(), " was running"));
  check_interrupt();
  throw_if_poisoned();
  const Fate known = mesh_->fate(peer);
  const Fate fate = net::fate_of(known, memory_.block(peer).closed.load(std::memory_order_acquire) != 0);
  if (fate != Fate::alive) {
    // Progress that it published before it ended counts.
    if (has_reached(peer, stage, target)) return;
    poison(net::cause_of(fate), peer);
    throw_if_poisoned();
  }
  const auto now = Clock::now();
  if (stage == Stage::arrived && current_ != nullptr) {
    standstill_.look(*current_, late_ranks(stage, peer, target), clock_.waited_s(now));
    throw_if_poisoned();
  }
  if (!clock_.is_warning_due(now) && !clock_.is_over(now)) return;
  const std::vector<int> late = late_ranks(stage, peer, target);
  if (late.empty()) return;  // it arrived in the meantime
  if (is_suspended(memory_.rank()) || std::any_of(late.begin(), late.end(), [&](int r) { return is_suspended(r); }))
    return restart_clock();
  if (!clock_.is_over(now)) return warn(stage, target, late);
  const bool show_life = std::none_of(late.begin(), late.end(), [&](int rank) {
    const auto process = mesh_->process(rank);  // one that has ended is lost, whatever the deadline
    return process && process->is_stopped;
  });
  if (!show_life || !clock_.extend(now)) give_up_late(stage, late);
}

std::vector<int> Liveness::late_ranks(Stage stage, int waited_for, std::uint32_t target) const {
  // At entry and exit every rank is needed, so every missing rank is named.
  const bool all = stage == Stage::arrived || stage == Stage::done;
  std::vector<int> late;
  for (int peer = 0; peer < memory_.world_size(); ++peer)
    if (peer != memory_.rank() && (all || peer == waited_for) && !has_reached(peer, stage, target))
      late.push_back(peer);
  return late;
}

void Liveness::give_up_late(Stage stage, const std::vector<int>& late) {
  ControlBlock& own = memory_.own();
  std::strncpy(own.failure, complaint(stage, late, true).c_str(), sizeof(own.failure) - 1);
  poison(Cause::late, late.front());
  throw_if_poisoned();
}

/// Only one of the ranks that wait in the operation posts the warning.
void Liveness::warn(Stage stage, std::uint32_t target, const std::vector<int>& late) {
  clock_.set_warned();
  const std::uint32_t sequence = current_ == nullptr ? 0 : current_->sequence;
  if (memory_.block(0).warned.exchange(sequence, std::memory_order_acq_rel) == sequence) return;
  warned_of_ = late, warned_stage_ = stage, warned_target_ = target;
  post_notice(text(context_(), complaint(stage, late, false)));
}

void Liveness::log_arrival() {
  for (const int rank : warned_of_)
    if (!has_reached(rank, warned_stage_, warned_target_)) return;
  post_notice(
      text(context_(), during(), ": rank ", join(warned_of_), " came after ", clock_.waited_s(Clock::now()), " s"));
  warned_of_.clear();
}

/// Names late ranks, at the deadline or before it.
std::string Liveness::complaint(Stage stage, const std::vector<int>& late, bool has_ended) const {
  std::string details;
  for (const int rank : late) {
    details += text("; rank ", rank);
    const auto process = mesh_->process(rank);
    if (process && (!has_ended || process->is_stopped)) details += text(" (process ", process->pid, " of this host)");
    if (process && process->is_stopped) details += " is stopped (SIGSTOP, or a debugger);";
    details += text(" ", last_operation(rank));
  }
  return text(during(), ": rank ", memory_.rank(), has_ended ? " waited " : " has waited ",
              clock_.waited_s(Clock::now()), " s for rank ", join(late), " ", waiting_for(stage), details);
}

bool Liveness::has_reached(int peer, Stage stage, std::uint32_t target) const {
  return reached(memory_.block(peer).signal(stage, target).value.load(std::memory_order_acquire), target);
}

std::string Liveness::last_operation(int peer) const {
  ControlBlock& block = memory_.block(peer);
  const std::uint32_t arrived = block.last_entered();
  if (arrived == 0) return "has called nothing yet";
  return text("last entered operation ", arrived, ", ", describe(block.signatures[arrived & 1]));
}

std::string Liveness::during() const {
  return current_ == nullptr ? "no operation" : text(describe(*current_), " (operation ", current_->sequence, ")");
}

void Liveness::poison(Cause cause, int rank) const noexcept {
  std::uint32_t none = 0;
  const std::uint32_t word = encode(static_cast<int>(cause), memory_.rank(), rank);
  if (memory_.block(0).poison.compare_exchange_strong(none, word)) memory_.wake_all();
}

void Liveness::fail(const std::string& what) noexcept {
  if (memory_.block(0).poison.load() != 0) return;  // others may be reading this rank's earlier message
  ControlBlock& own = memory_.own();
  std::strncpy(own.failure, what.c_str(), sizeof(own.failure) - 1);
  poison(closing_ ? Cause::left : Cause::failed, memory_.rank());
}

void Liveness::end_standstill(const std::string& message) noexcept {
  if (memory_.block(0).poison.load() != 0) return;
  ControlBlock& own = memory_.own();
  std::strncpy(own.failure, message.c_str(), sizeof(own.failure) - 1);
  poison(Cause::mismatch, memory_.rank());
}

void Liveness::close() noexcept {
  closing_ = true;
  memory_.own().closed.store(1, std::memory_order_release);
  memory_.wake_all();
}

void Liveness::throw_if_poisoned() const {
  if (const std::uint32_t word = memory_.block(0).poison.load(); word != 0) throw_poison(word, during());
}

void Liveness::throw_if_failed(const Signature& during) const {
  if (const std::uint32_t word = memory_.block(0).poison.load(); word != 0) throw_poison(word, describe(during));
}

void Liveness::throw_poison(std::uint32_t word, const std::string& during) const {
  const int noticed_by = static_cast<int>(word >> 12 & (kRankLimit - 1));
  const int rank = static_cast<int>(word & (kRankLimit - 1));
  const auto cause = static_cast<Cause>(word >> 24);
  const char* const failure = memory_.block(noticed_by).failure;
  const std::size_t length = net::has_message(cause) ? strnlen(failure, sizeof(ControlBlock::failure)) : 0;
  net::throw_cause(cause, rank, std::string(failure, length), during);
}

}  // namespace zcomm::coll
