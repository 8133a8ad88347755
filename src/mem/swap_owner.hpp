// SwapOwner: the process that owns a swap directory, as its lock file names it, and whether that process has ended.
//
// A free lock (flock) proves that the owner has ended if all processes that see the directory share one kernel. On file
// systems that several machines or mounts may share, only one of them may know a lock. There the owner process itself
// is looked up, and counts as alive if it cannot be looked up from here (another host, boot or pid namespace). Thread
// rule: pure functions.
#pragma once

#include <cstddef>
#include <string>

namespace zcomm::mem {

/// The lock file's text for this process: pid, start time, pid namespace, boot, host, user, drive and number of drives.
std::string owner_record(std::size_t drive, std::size_t drives);

/// True when the process of `record` has certainly ended. Records of earlier versions have no boot and no pid
/// namespace: the host's name replaces them.
bool owner_is_gone(const std::string& record);

/// True if a free lock below the open file or directory proves it: a file system local to this machine.
bool locks_are_proof(int fd);

}  // namespace zcomm::mem
