// See monitor.hpp.
#include "net/monitor.hpp"

#include <sys/socket.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "base/error.hpp"
#include "net/socket.hpp"

namespace zcomm::net {

namespace {

constexpr std::byte kGoodbye{'G'};
constexpr int kNone = -1;

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

struct Monitor::State {
  explicit State(std::vector<Watched> peers) : watched(std::move(peers)), fates(watched.size()) {}

  void run();
  bool poll_once();
  Fate look_at(std::size_t rank, bool process_ended) const;
  void record(std::size_t rank, Fate fate);

  std::vector<Watched> watched;  // closed by run() at its end, under `mutex`
  std::vector<std::atomic<Fate>> fates;
  std::atomic<int> first{kNone};
  UniqueFd stop_event = make_event();
  UniqueFd loss_event = make_event();

  std::mutex mutex;
  std::condition_variable callback_ended;
  std::map<int, std::shared_ptr<std::function<void(Loss)>>> callbacks;
  int next_id = 0;
  int running_id = -1;
  std::thread::id thread;
};

void Monitor::State::run() {
  while (poll_once()) {
  }
  const std::lock_guard lock(mutex);
  watched.clear();
}

/// Waits for one round of events; false when told to stop.
bool Monitor::State::poll_once() {
  std::vector<pollfd> fds{{stop_event.get(), POLLIN, 0}};
  for (std::size_t rank = 0; rank < watched.size(); ++rank) {
    const bool alive = fates[rank].load(std::memory_order_relaxed) == Fate::alive;
    fds.push_back({alive ? watched[rank].control.get() : -1, POLLIN | POLLRDHUP, 0});
    fds.push_back({alive ? watched[rank].process.get() : -1, POLLIN, 0});
  }
  wait_for(fds, Deadline(1e18));
  if (fds[0].revents != 0) return false;
  for (std::size_t rank = 0; rank < watched.size(); ++rank) {
    const short control = fds[1 + 2 * rank].revents, process = fds[2 + 2 * rank].revents;
    if (control == 0 && process == 0) continue;
    const Fate fate = look_at(rank, process != 0);
    if (fate != Fate::alive) record(rank, fate);
  }
  return true;
}

Fate Monitor::State::look_at(std::size_t rank, bool process_ended) const {
  // A goodbye is sent before the process ends, so it has arrived by now if there is one.
  std::byte byte{0};
  const ssize_t got = ::recv(watched[rank].control.get(), &byte, 1, MSG_DONTWAIT);
  if (got == 1 && byte == kGoodbye) return Fate::left;
  if (got >= 0) return Fate::died;
  const bool would_block = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  return would_block && !process_ended ? Fate::alive : Fate::died;
}

void Monitor::State::record(std::size_t rank, Fate fate) {
  const Loss loss{static_cast<int>(rank), fate};
  fates[rank].store(fate, std::memory_order_release);
  int none = kNone;
  first.compare_exchange_strong(none, loss.rank, std::memory_order_acq_rel);
  signal_event(loss_event);

  std::unique_lock lock(mutex);
  for (auto next = callbacks.begin(); next != callbacks.end();) {
    const int id = next->first;
    const auto callback = next->second;
    running_id = id;
    lock.unlock();
    (*callback)(loss);
    lock.lock();
    running_id = -1;
    callback_ended.notify_all();
    next = callbacks.upper_bound(id);
  }
}

Monitor::Monitor(std::vector<Watched> watched) : state_(std::make_shared<State>(std::move(watched))) {
  if (state_->watched.size() < 2) return;
  const std::lock_guard lock(state_->mutex);
  thread_ = std::thread([state = state_] { state->run(); });
  state_->thread = thread_.get_id();
}

Monitor::~Monitor() {
  stop();
  const std::lock_guard lock(thread_mutex_);
  if (thread_.joinable()) thread_.detach();  // destroyed by a callback
}

std::optional<Loss> Monitor::lost() const {
  const int rank = state_->first.load(std::memory_order_acquire);
  return rank == kNone ? std::nullopt : std::optional(Loss{rank, fate(rank)});
}

Fate Monitor::fate(int rank) const {
  if (rank < 0 || static_cast<std::size_t>(rank) >= state_->fates.size()) return Fate::alive;
  return state_->fates[static_cast<std::size_t>(rank)].load(std::memory_order_acquire);
}

std::optional<ProcessState> Monitor::process(int rank) const {
  int fd = -1;
  std::string fields;
  {
    const std::lock_guard lock(state_->mutex);
    if (rank < 0 || static_cast<std::size_t>(rank) >= state_->watched.size()) return std::nullopt;
    fd = state_->watched[static_cast<std::size_t>(rank)].process.get();
    if (fd < 0) return std::nullopt;
    fields = read_file(text("/proc/self/fdinfo/", fd));
  }
  const std::size_t at = fields.find("Pid:");
  const int pid = at == std::string::npos ? 0 : std::atoi(fields.c_str() + at + 4);
  if (pid <= 0) return std::nullopt;  // it ended, or another container hides it
  const std::string stat = read_file(text("/proc/", pid, "/stat"));
  const std::size_t name_end = stat.rfind(')');  // the name may contain anything
  if (name_end == std::string::npos || name_end + 2 >= stat.size()) return std::nullopt;
  const char state = stat[name_end + 2];
  return ProcessState{pid, state == 'T' || state == 't'};
}

int Monitor::on_loss(std::function<void(Loss)> callback) {
  const std::lock_guard lock(state_->mutex);
  state_->callbacks[state_->next_id] = std::make_shared<std::function<void(Loss)>>(std::move(callback));
  return state_->next_id++;
}

void Monitor::forget(int id) {
  std::unique_lock lock(state_->mutex);
  state_->callbacks.erase(id);
  if (std::this_thread::get_id() == state_->thread) return;  // called by a callback: it cannot wait for itself
  state_->callback_ended.wait(lock, [this, id] { return state_->running_id != id; });
}

const UniqueFd& Monitor::loss_event() const { return state_->loss_event; }

void Monitor::say_goodbye() noexcept {
  const std::lock_guard lock(state_->mutex);
  for (const Watched& peer : state_->watched) {
    // One byte fits on a socket that never carried one; a peer that has ended need not receive it.
    if (peer.control) (void)::send(peer.control.get(), &kGoodbye, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

void Monitor::stop() noexcept {
  const std::lock_guard lock(thread_mutex_);
  if (!thread_.joinable()) return;  // in particular in a forked child, which shares the eventfd with its parent
  signal_event(state_->stop_event);
  if (thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

void Monitor::abandon() noexcept {
  if (thread_.joinable()) thread_.detach();
}

}  // namespace zcomm::net
