// Forks: how often this process has been forked away from the one that made an object.
//
// A forked child shares memory and sockets with its parent; it must neither use nor close what belongs to the job.
// Thread rule: free-threaded. Source: pthread_atfork(3).
#pragma once

namespace zcomm {

/// A number that differs between a process and its forked children.
int fork_generation() noexcept;

}  // namespace zcomm
