// NcclEngine: collectives on CUDA memory by NCCL, guarded by a communicator of the same ranks on the host (D5, D9).
//
// Each operation first passes a barrier of `control`, with a name that describes it. So mismatches, late ranks and dead
// ranks are found and reported as by every engine, before a kernel starts that could hang. Then NCCL runs on the
// engine's own stream, which first waits for the work already on the call's stream (Ticket), while the host waits for
// its end and watches the deadline, lost ranks and NCCL's asynchronous errors. A failure aborts NCCL's communicator,
// and a normal end finalizes it. Bits: reduce_scatter sends every rank its parts and adds them in rank order by zcomm's
// own kernel, so it has the CPU's bits (D3), up to as many ranks as the kernel takes. all_reduce and reduce sum in an
// order of NCCL's: equal on all ranks, but other bits. Thread rule: as Engine's. Source: NCCL user guide, "Fault
// tolerance" (non-blocking communicators).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coll/cuda/nccl_library.hpp"
#include "coll/cuda/part_pieces.hpp"
#include "coll/cuda/ticket.hpp"
#include "coll/engine.hpp"
#include "device/device.hpp"
#include "net/mesh.hpp"

namespace zcomm::coll {

struct NcclOptions {
  double timeout_s = 600.0;                             ///< deadline of every operation
  std::size_t received_nbytes = std::size_t{64} << 20;  ///< the most that parts of a reduce_scatter take at a time
};

class NcclEngine final : public Engine {
 public:
  /// Collective over `control`, which must outlive the engine and have no other user; `watched` connects the same
  /// ranks; `nccl` outlives it too. Throws CudaError for an error of NCCL.
  NcclEngine(Communicator& control, std::shared_ptr<net::Mesh> watched, std::shared_ptr<device::Device> device,
             const NcclLibrary& nccl, const NcclOptions& options);
  ~NcclEngine() override;

  OwnParts own_parts() const override { return OwnParts::refused; }
  const char* codec_refusal() const override { return "its buffers are on a device, and codecs run on the host"; }
  int rank() const override { return control_.rank(); }
  int world_size() const override { return control_.world_size(); }
  void prepare(Operation& operation, const Call& call) noexcept override { tickets_.prepare(operation, call); }
  void run(Operation& operation) override;
  Messenger& messenger() override;
  void close() noexcept override;
  void suspend_deadline(bool suspended) override;
  double longest_s() const override { return options_.timeout_s; }
  std::size_t nbytes() const override { return control_.memory().slot_nbytes + received_nbytes_; }

 private:
  void connect();
  void enter(const Operation& operation);
  void carry_out(const Operation& operation);
  void compare_parts(const Operation& operation);
  bool adds_by_kernel(const Signature& signature) const;
  void require_supported(const Signature& signature) const;
  void launch(const Operation& operation);
  template <class Calls>
  void launch_group(const Calls& calls);
  void add_parts(const Operation& operation);
  void swap_pieces(const Signature& signature, std::span<const PartPiece> pieces);
  void add_piece(const Signature& signature, const PartPiece& piece);
  void launch_item(const Signature& signature, const Item& item, int peer);
  void deal(const Signature& signature, const Item& item);
  void check(int result, const char* what);
  void finish_call(const char* what);
  int look_around(const char* what);
  std::optional<net::Loss> lost() const;
  std::chrono::duration<double> timeout() const { return std::chrono::duration<double>(options_.timeout_s); }
  void restart_clock();
  void finish() noexcept;
  void abort() noexcept;

  Communicator& control_;
  std::shared_ptr<net::Mesh> watched_;
  const std::shared_ptr<device::Device> device_;
  const NcclLibrary& nccl_;
  const NcclOptions options_;
  TicketPool tickets_;
  std::unique_ptr<device::Stream> stream_;
  NcclLibrary::Comm comm_ = nullptr;
  device::Memory received_;  // the other ranks' pieces; used in the stream's order
  std::atomic<std::size_t> received_nbytes_{0};
  std::vector<const void*> sources_;
  std::chrono::steady_clock::time_point deadline_;
  std::string during_;
  bool has_last_words_ = false;  ///< the deadline applies to work pending when a rank was lost
  std::atomic<bool> closing_{false};
  std::atomic<bool> suspended_{false};
};

/// Collective; see NcclEngine.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& control, std::shared_ptr<net::Mesh> watched,
                                                     std::shared_ptr<device::Device> device, const NcclLibrary& nccl,
                                                     const NcclOptions& options = {});
/// The same on CUDA device `device`, by the libnccl that NcclLibrary::load finds. Throws Unsupported without one or in
/// a build without CUDA, CudaError without a device.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& control, std::shared_ptr<net::Mesh> watched,
                                                     int device, const std::string& library,
                                                     const NcclOptions& options = {});

}  // namespace zcomm::coll
