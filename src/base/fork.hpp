// Forks: the number of forks between the process that made an object and this one.
//
// A forked child shares memory and sockets with its parent; it must neither use nor close the job's. Thread rule:
// free-threaded. Source: pthread_atfork(3).
#pragma once

namespace zcomm {

/// A number that differs between a process and its forked children.
int fork_generation() noexcept;

}  // namespace zcomm
