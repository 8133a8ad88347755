// The list of notices (base/notices.hpp).
#include "base/notices.hpp"

#include <atomic>
#include <mutex>
#include <utility>

namespace zcomm {
namespace {

struct Board {
  std::mutex mutex;
  std::vector<std::string> lines;
  std::atomic<bool> has_lines{false};
};

Board& board() {
  static auto* const only = new Board;  // threads may post while the process ends
  return *only;
}

}  // namespace

void post_notice(std::string line) noexcept {
  try {
    Board& to = board();
    const std::lock_guard lock(to.mutex);
    if (to.lines.size() >= kMostNotices) return;
    to.lines.push_back(std::move(line));
    to.has_lines = true;
  } catch (...) {  // no memory for a line of text
  }
}

bool has_notices() noexcept { return board().has_lines.load(std::memory_order_relaxed); }

std::vector<std::string> take_notices() {
  Board& from = board();
  const std::lock_guard lock(from.mutex);
  from.has_lines = false;
  return std::exchange(from.lines, {});
}

}  // namespace zcomm
