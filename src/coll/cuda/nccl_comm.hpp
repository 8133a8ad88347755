// NcclComm: one communicator of NCCL, begun by all its ranks, ended by finalize and destroy or by one abort.
//
// It is non-blocking: a call of NCCL may stay in progress, for example while it connects ranks, until its state has
// been queried often enough. Meanwhile `Look` is called, which throws to give up. A split makes communicators of parts
// over the connections of this one, without an id of their own.
// Invariant: no function of NCCL runs on the communicator while it is aborted. Thread rule: init, split, group and
// finalize by one thread at a time; state and abort from any thread. Source: NCCL user guide, "Fault tolerance".
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "coll/cuda/nccl_library.hpp"
#include "device/device.hpp"

namespace zcomm::coll {

class NcclComm {
 public:
  using Look = std::function<void()>;

  /// `nccl` outlives it.
  NcclComm(std::shared_ptr<device::Device> device, const NcclLibrary& nccl) : device_(std::move(device)), nccl_(nccl) {}
  ~NcclComm() { abort(); }
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  /// Rank 0 makes the id and sends it to the others. Throws CudaError.
  NcclId make_id();
  /// Collective. Throws CudaError, and the error of `look`.
  void init(int world_size, const NcclId& id, int rank, const Look& look);
  /// Collective: makes this rank's part, of the ranks of one color >= 0, in order of `key`; null for color -1. Nothing
  /// may run on this communicator. Throws as init.
  std::shared_ptr<NcclComm> split(int color, int key, const Look& look);
  /// Makes one call of all that `calls` calls, on the communicator that it gets. Throws CudaError; the error of `look`;
  /// Error once aborted.
  void group(const std::function<void(NcclLibrary::Comm)>& calls, const Look& look);
  /// Throws CudaError with NCCL's words for a result that is an error.
  void check(int result, const char* what) const;

  /// kSuccess (also after its end), kInProgress or kRemoteError. Throws CudaError for another state.
  int state();
  /// Says goodbye to the other ranks, which may be dead: within `patience_s`. Nothing may run on it. False: abort it.
  bool finalize(double patience_s) noexcept;
  /// Ends its kernels early, wherever they are. Idempotent.
  void abort() noexcept;
  bool is_open() const;

 private:
  int query(const char* what);
  void finish(const char* what, const Look& look);

  const std::shared_ptr<device::Device> device_;
  const NcclLibrary& nccl_;
  mutable std::mutex mutex_;  // of one call, never of a wait
  NcclLibrary::Comm comm_ = nullptr;
};

}  // namespace zcomm::coll
