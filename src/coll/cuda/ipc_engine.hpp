// CudaIpcEngine: collectives on CUDA memory between the ranks of one host, by copies and kernels of our own.
//
// [Note: life of an operation on a device]
// 1. The call, on the caller's thread: a ticket's `ready` event is recorded on the caller's stream (Engine::prepare).
// 2. run(): the engine's stream waits for it; this rank's point is recorded; the ranks enter on the host, compare their
//    calls (Arrival: the same check and the same messages as every engine, before anything starts), and exchange the
//    addresses of their buffers; the stream waits for the points of all ([Note: points] in ipc_rounds.hpp).
// 3. Symmetric buffers at one place: owner computes (DeviceDirect). Else staging slots, in steps (DeviceStaged).
// 4. A last round, then the ticket's `end`: after it no other rank touches this one's memory for this operation.
// 5. The caller's stream waits for `end`: at once in a blocking call, in Work::wait() otherwise. The host waits for
//    other ranks' hosts (they must have called, too), never for a device, but for the operation kInFlight before.
// Ranks may have a device each or share one: that sizes the reduction's grid, and nothing else. Streams only wait for
// points that have been recorded, so a rank that is behind holds up another's host only by coming late to an entry.
//
// [Note: a rank that dies] Sockets show it at once (Liveness), and the next call of every rank raises PeerLost. An
// event that a stream waits for may then never happen: if a process ends before the device reaches its event, CUDA's
// documents do not define the result, so we rely on nothing. A thread that waits on the host (Work::wait, a full queue,
// close()) polls and gets PeerLost after half a second of grace. A wait already queued on the program's stream cannot
// be withdrawn: a program that synchronises that stream after a rank died depends on the driver. [Note: the end] A rank
// that closes drains its stream, closes the memory that it opened, posts a farewell in host memory, waits a second for
// the others' farewells and frees its own memory. If farewells are missing after a failure, peers may still be reading,
// so the memory is left to the process.
//
// Bits: the same as ShmEngine's (D3), because kernels sum in rank order, all of a chunk at once. Thread rule: Engine's.
// Source: CUDA C++ Programming Guide, "Interprocess Communication"; owner computes: docs/internals/algorithms.md.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "coll/cuda/ipc_direct.hpp"
#include "coll/cuda/ipc_memory.hpp"
#include "coll/cuda/ipc_rounds.hpp"
#include "coll/cuda/ipc_staged.hpp"
#include "coll/cuda/ticket.hpp"
#include "coll/engine.hpp"
#include "coll/shm/arrival.hpp"

namespace zcomm::coll {

struct CudaIpcOptions {
  double timeout_s = 600.0;
  std::size_t slot_nbytes = 4 << 20;  ///< of a staging slot; there are four
  double limit_s = 0.0;               ///< as CommOptions has them
  double warn_s = 60.0;
};

class CudaIpcEngine final : public Engine {
 public:
  /// Collective over `mesh`. Throws Unsupported for more ranks than a kernel takes, CudaError.
  CudaIpcEngine(std::shared_ptr<net::Mesh> mesh, std::shared_ptr<device::Device> device, const CudaIpcOptions& options,
                SymmetricMemory& symmetric);
  ~CudaIpcEngine() override;

  OwnParts own_parts() const override { return OwnParts::refused; }
  const char* codec_refusal() const override { return "its buffers are on a device, and codecs run on the host"; }
  int rank() const override { return memory_.rank(); }
  int world_size() const override { return memory_.world_size(); }
  void prepare(Operation& operation, const Call& call) noexcept override;
  void run(Operation& operation) override;
  Messenger& messenger() override;
  void fail(const std::string& why) noexcept override { liveness_.fail(why); }
  void close() noexcept override;
  void suspend_deadline(bool suspended) override;
  double longest_s() const override { return liveness_.longest_s(); }
  std::size_t nbytes() const override { return memory_.nbytes() + (slots_ ? slots_->nbytes() : 0); }

 private:
  static constexpr std::size_t kInFlight = 32;  ///< operations that the host may be ahead of the device

  void set_up(std::size_t slot_nbytes, SymmetricMemory& symmetric);
  void start(Operation& operation, Ticket& ticket);
  void work(const Operation& operation);
  void compare_splits(const Operation& operation, const SignatureOf& signature_of);
  bool drain(double patience_s) noexcept;
  bool wait_for_farewells() noexcept;

  const std::shared_ptr<net::Mesh> mesh_;
  HostMemory memory_;  // for exchanges between the hosts' sides only
  Liveness liveness_;
  Arrival arrival_;
  const std::shared_ptr<DeviceLiveness> device_liveness_;
  TicketPool tickets_;
  std::array<std::shared_ptr<Ticket>, kInFlight> in_flight_;
  std::size_t next_ = 0;
  bool failed_ = false;
  std::unique_ptr<DeviceRounds> rounds_;
  std::unique_ptr<DeviceSlots> slots_;
  std::unique_ptr<DeviceHeap> heap_;
  std::unique_ptr<DeviceDirect> direct_;
  std::unique_ptr<DeviceStaged> staged_;
};

/// Collective over `mesh`: ranks of one host, each with its device (the same or another one).
std::unique_ptr<Communicator> make_cuda_ipc_communicator(std::shared_ptr<net::Mesh> mesh,
                                                         std::shared_ptr<device::Device> device,
                                                         const CudaIpcOptions& options = {});

}  // namespace zcomm::coll
