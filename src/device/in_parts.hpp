// in_parts: one pass over memory on several threads, because one does not saturate the memory of a machine with many
// cores.
#pragma once

#include <cstddef>

#include "base/thread_pool.hpp"

namespace zcomm::device {

/// Elements, of element_nbytes read and written each, below which waking threads costs more than it saves.
std::size_t least_part_count(std::size_t element_nbytes);

/// body(begin, end) on parts of [0, count) that begin at multiples of 4096: on the calling thread, and on threads of
/// the core's pool if the pool is idle and count is at least least_part_count. Not from inside of a loop of the pool.
void in_parts(std::size_t count, std::size_t element_nbytes, const ThreadPool::Body& body);

}  // namespace zcomm::device
