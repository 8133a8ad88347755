// DeviceRounds: the ranks' streams synchronized by shared events, and the host barriers that make that safe.
//
// [Note: points] Each rank has one stream for its part of all operations, and two shared events that mark points in it.
// A round: every rank records its point, the ranks have a barrier on the host, and each makes its stream wait for the
// points of all others. So work queued on a stream after round t runs after everything that any rank had queued on its
// own before round t; no kernel spins and the host never waits for a device. An event of another process has a pitfall:
// a wait binds to the point recorded last at the time of the call, so it must be called after that record and before
// the next one. The host's order ensures both: record, barrier, wait; and the event of round t is recorded again in
// round t + 2, which no rank reaches before all have called their waits of round t (they do so before they enter round
// t + 1). Thread rule: the thread that runs the operation.
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

  /// Handles by which the peers open this rank's events.
  std::array<device::SharedHandle, 2> handles();
  /// Collective: before the first round, with the results of each rank's handles().
  void open(int rank, const std::array<device::SharedHandle, 2>& handles);

  /// Before the barrier: records this rank's point.
  void mark();
  /// After the barrier: orders later work on the stream after the points of all.
  void follow();
  /// A round.
  void barrier() {
    mark();
    barrier_on_host();
    follow();
  }
  /// A barrier of the hosts; it says nothing about their devices.
  void barrier_on_host();

  /// Gives `nbytes` (a host slot at most) to all ranks; theirs are gathered(rank) until this rank's next barrier.
  void all_gather_on_host(const void* mine, std::size_t nbytes);
  const std::byte* gathered(int rank) const { return memory_.slot(rank, 0); }

  /// Forgets the peers' events.
  void close_peers() noexcept { peers_.clear(); }
  /// The device completes work already on the stream; nothing can be queued on it any more.
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
