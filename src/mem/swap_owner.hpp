// SwapOwner: the process that owns a swap directory, as the lock file in it names the process, and whether it is gone.
//
// A free lock (flock) proves that the owner is gone where all processes that see the directory share one kernel. On
// file systems that several machines or mounts may share, a lock may be known to one of them alone; there the owner
// itself is looked for, and one that cannot be looked for from here (another host, boot or pid namespace) counts as
// living. Thread rule: pure functions.
#pragma once

#include <cstddef>
#include <string>

namespace zcomm::mem {

/// The lock file's text, of this process: pid, start time, pid namespace, boot, host, user; and which drive of how
/// many.
std::string owner_record(std::size_t drive, std::size_t drives);

/// True when the process of `record` has ended for certain. Records of earlier versions name no boot and no pid
/// namespace: the host's name stands for them.
bool owner_is_gone(const std::string& record);

/// True when a free lock below the open file or directory is proof: a file system of this machine's own.
bool locks_are_proof(int fd);

}  // namespace zcomm::mem
