// Notices: messages of the core for the program's log, such as a late rank. Errors are thrown instead.
//
// The core only queues lines; the program fetches them at any time (Python: threads that wait within the core, and
// calls that have waited). Invariant: at most kMostNotices lines are kept; later ones are dropped. Thread rule:
// free-threaded; post_notice never throws. A forked child must not post: another thread may have the lock.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace zcomm {

constexpr std::size_t kMostNotices = 1000;

void post_notice(std::string line) noexcept;
/// Cheap: one load.
bool has_notices() noexcept;
/// The lines since the last call, oldest first.
std::vector<std::string> take_notices();

}  // namespace zcomm
