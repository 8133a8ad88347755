// NcclEngine: collectives on CUDA memory by NCCL. Ranks compare their calls behind them (D5, D9).
//
// A call ends on the host when it is on the engine's stream, which first waits for the work already on the call's
// stream (Ticket); the host waits for no other rank and no device, except for the operation kInFlight before. Ranks
// compare calls afterwards ([Note: guard behind] in trailing_guard.hpp), over a communicator of the same ranks on the
// host; its thread also watches deadlines, lost ranks and NCCL's asynchronous errors. Only a barrier waits on the host,
// too. A failure aborts NCCL's communicator, and a normal end finalizes it. The first call between two ranks connects
// them, so it does wait until the other one calls, too. Bits: reduce_scatter sends every rank its parts and adds them
// in rank order by zcomm's own kernel, so it has the CPU's bits (D3), up to as many ranks as the kernel takes.
// all_reduce and reduce sum in an order of NCCL's: equal on all ranks, but other bits. Thread rule: as Engine's.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coll/cuda/nccl_comm.hpp"
#include "coll/cuda/nccl_library.hpp"
#include "coll/cuda/nccl_messenger.hpp"
#include "coll/cuda/part_pieces.hpp"
#include "coll/cuda/ticket.hpp"
#include "coll/cuda/trailing_guard.hpp"
#include "coll/engine.hpp"
#include "device/device.hpp"
#include "net/mesh.hpp"

namespace zcomm::coll {

struct NcclOptions {
  double timeout_s = 600.0;                             ///< deadline of every operation
  double round_s = 0.25;                                ///< between two rounds of the guard
  std::size_t received_nbytes = std::size_t{64} << 20;  ///< the most that parts of a reduce_scatter take at a time
};

/// Communicators on the host, of the same ranks, which outlive the engine and have no other user.
struct NcclHosts {
  Communicator& control;                       ///< NCCL's id, barriers
  Communicator& guard;                         ///< rounds of the guard
  Communicator* messages = nullptr;            ///< matches send and recv; null: these are refused
  std::shared_ptr<NcclComm> joined = nullptr;  ///< of a split, on all ranks; null: they join by an id
};

class NcclEngine final : public Engine, private Guarded {
 public:
  /// Collective over `hosts`; `watched` connects the same ranks; `nccl` outlives it too. Throws CudaError for an error
  /// of NCCL.
  NcclEngine(const NcclHosts& hosts, std::shared_ptr<net::Mesh> watched, std::shared_ptr<device::Device> device,
             const NcclLibrary& nccl, const NcclOptions& options);
  ~NcclEngine() override;

  OwnParts own_parts() const override { return OwnParts::refused; }
  const char* codec_refusal() const override { return "its buffers are on a device, and codecs run on the host"; }
  int rank() const override { return control_.rank(); }
  int world_size() const override { return control_.world_size(); }
  void prepare(Operation& operation, const Call& call) noexcept override { tickets_.prepare(operation, call); }
  void run(Operation& operation) override;
  bool compares_behind() const override { return true; }
  void verify(bool behind) override;
  bool splits() const override { return splits_; }
  Messenger& messenger() override;
  void fail(const std::string& why) noexcept override;
  void close() noexcept override;
  void suspend_deadline(bool suspended) override;
  double longest_s() const override { return options_.timeout_s; }
  std::size_t nbytes() const override { return control_.memory().slot_nbytes + received_nbytes_; }

 private:
  static constexpr std::size_t kInFlight = 32;  ///< operations that the host may be ahead of the device

  double patience_s() const;
  void connect();
  void split(const Operation& operation);
  void look_meanwhile(const Signature& running);
  void carry_out(Operation& operation);
  template <class Function>
  void fail_together(const Function& function, const Signature& during);
  void enter(const Operation& operation);
  void join_streams();
  void launch(const Operation& operation);
  bool adds_by_kernel(const Signature& signature) const;
  void require_supported(const Signature& signature) const;
  void launch_group(const std::function<void()>& calls);
  void add_parts(const Operation& operation);
  void make_room(std::size_t nbytes);
  void swap_pieces(const Signature& signature, std::span<const PartPiece> pieces);
  void add_piece(const Signature& signature, const PartPiece& piece);
  void launch_item(const Signature& signature, const Item& item, int peer);
  void deal(const Signature& signature, const Item& item);
  void send(const void* data, std::size_t count, int dtype, int peer);
  void recv(void* data, std::size_t count, int dtype, int peer);
  std::optional<net::Loss> lost() const;
  // Guarded
  bool look() override;
  void raise_missing() override;
  void stop() noexcept override;

  Communicator& control_;
  Communicator& guard_control_;
  const std::shared_ptr<net::Mesh> watched_;
  const std::shared_ptr<device::Device> device_;
  const NcclLibrary& nccl_;
  const NcclOptions options_;
  const std::unique_ptr<NcclMessenger> messenger_;
  const std::shared_ptr<TrailingGuard> guard_;  // Works ask it after the engine's end
  const std::shared_ptr<DeviceLiveness> device_liveness_;
  TicketPool tickets_;
  std::array<std::shared_ptr<Ticket>, kInFlight> in_flight_;
  std::size_t next_ = 0;
  std::unique_ptr<device::Stream> stream_;
  const std::shared_ptr<NcclComm> comm_;
  bool splits_ = false;                 // on all ranks
  NcclLibrary::Comm native_ = nullptr;  // within launch_group
  device::Memory received_;             // the other ranks' pieces; used in the stream's order
  std::shared_ptr<Ticket> receives_;    // of the last operation that used it
  std::atomic<std::size_t> received_nbytes_{0};
  std::vector<const void*> sources_;
  device::Memory token_;  // of barriers
  const Signature* running_ = nullptr;
  std::atomic<bool> closing_{false};
  std::atomic<bool> suspended_{false};
};

/// Collective; see NcclEngine.
std::unique_ptr<Communicator> make_nccl_communicator(const NcclHosts& hosts, std::shared_ptr<net::Mesh> watched,
                                                     std::shared_ptr<device::Device> device, const NcclLibrary& nccl,
                                                     const NcclOptions& options = {});
/// The same on CUDA device `device`, by the libnccl that NcclLibrary::load finds. Throws Unsupported without one or in
/// a build without CUDA, CudaError without a device.
std::unique_ptr<Communicator> make_nccl_communicator(const NcclHosts& hosts, std::shared_ptr<net::Mesh> watched,
                                                     int device, const std::string& library,
                                                     const NcclOptions& options = {});

}  // namespace zcomm::coll
