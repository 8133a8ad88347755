// DeviceRounds: the ranks' streams kept in step by shared events, and the host words that make that safe.
//
// [Note: points] Each rank has one stream for its part of all operations, and two shared events that mark points in it.
// A round: every rank records its point, the ranks have a barrier on the host, and each makes its stream wait for the
// points of all others. So what a stream is given after round t runs after everything that any rank had put on its own
// before round t; no kernel spins and the host never waits for a device. An event of another process is a pitfall: a
// wait takes the point that was recorded last when it is called, so it must be called after that record and before the
// next one. Both are the host's order: record, barrier, wait; and the event of round t is recorded again in round t +
// 2, which no rank reaches before all have called their waits of round t (they do so before they enter round t + 1).
// Thread rule: the thread that runs the operation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "coll/shm/liveness.hpp"
#include "device/device.hpp"

namespace zcomm::coll {

class DeviceRounds {
 public:
  DeviceRounds(device::Device& device, const HostMemory& memory, Liveness& liveness);

  device::Stream& stream() { return *stream_; }

  /// What the peers need of this rank's events.
  std::array<device::SharedHandle, 2> handles();
  /// Collective: before the first round, with what each rank's handles() returned.
  void open(int rank, const std::array<device::SharedHandle, 2>& handles);

  /// Before the barrier: this rank's point is here.
  void mark();
  /// After the barrier: what comes next on the stream comes after the points of all.
  void follow();
  /// A round.
  void barrier() {
    mark();
    barrier_on_host();
    follow();
  }
  /// All ranks have come as far; nothing about their devices.
  void barrier_on_host();

  /// Gives `nbytes` (a host slot at most) to all ranks; theirs are gathered(rank) until this rank's next barrier.
  void all_gather_on_host(const void* mine, std::size_t nbytes);
  const std::byte* gathered(int rank) const { return memory_.slot(rank, 0); }

  /// Forgets the peers' events.
  void close_peers() noexcept { peers_.clear(); }
  /// Whatever is on it yet, the device goes on with; nothing can be given to it any more.
  void drop_stream() noexcept { stream_.reset(); }

 private:
  using Points = std::array<std::unique_ptr<device::Event>, 2>;
  device::Device& device_;
  const HostMemory& memory_;
  Liveness& liveness_;
  std::unique_ptr<device::Stream> stream_;
  Points own_;
  std::vector<Points> peers_;  // by rank
  std::uint32_t round_ = 0, barriers_ = 0;
};

}  // namespace zcomm::coll
