// The life of a communicator of NCCL (coll/cuda/nccl_comm.hpp).
#include "coll/cuda/nccl_comm.hpp"

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 1000;
constexpr std::chrono::microseconds kNap{20};
constexpr const char* kAborted = "NCCL's communicator was aborted";

/// Keeps a place to which NCCL's own thread may still write, to the end of the process.
void keep(std::unique_ptr<NcclLibrary::Comm> place) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::unique_ptr<NcclLibrary::Comm>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(place));
}

}  // namespace

NcclId NcclComm::make_id() {
  NcclId id{};
  check(nccl_.get_unique_id(&id), "ncclGetUniqueId");
  return id;
}

void NcclComm::init(int world_size, const NcclId& id, int rank, const Look& look) {
  {
    const device::CurrentDevice current(*device_);
    NcclConfig config;
    NcclLibrary::Comm made = nullptr;
    const int result = nccl_.comm_init_rank_config(&made, world_size, id, rank, &config);
    const std::lock_guard lock(mutex_);
    comm_ = made;
    check(result, "ncclCommInitRankConfig");
  }
  finish("ncclCommInitRankConfig", look);
}

std::shared_ptr<NcclComm> NcclComm::split(int color, int key, const Look& look) {
  auto made = std::make_unique<NcclLibrary::Comm>(nullptr);
  try {
    {
      const device::CurrentDevice current(*device_);
      const std::lock_guard lock(mutex_);
      if (comm_ == nullptr) throw Error(kAborted);
      check(nccl_.comm_split(comm_, color, key, made.get(), nullptr), "ncclCommSplit");
    }
    finish("ncclCommSplit", look);
  } catch (...) {
    keep(std::move(made));
    throw;
  }
  if (*made == nullptr) return nullptr;
  auto part = std::make_shared<NcclComm>(device_, nccl_);
  part->comm_ = *made;
  part->finish("ncclCommSplit", look);
  return part;
}

void NcclComm::group(const std::function<void(NcclLibrary::Comm)>& calls, const Look& look) {
  {
    const device::CurrentDevice current(*device_);
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) throw Error(kAborted);
    check(nccl_.group_start(), "ncclGroupStart");
    try {
      calls(comm_);
    } catch (...) {
      nccl_.group_end();  // a thread's groups nest
      throw;
    }
    check(nccl_.group_end(), "ncclGroupEnd");
  }
  finish("ncclGroupEnd", look);
}

void NcclComm::check(int result, const char* what) const {
  if (result == NcclLibrary::kSuccess || result == NcclLibrary::kInProgress) return;
  throw CudaError(text(what, ": ", nccl_.get_error_string(result), ": ", nccl_.get_last_error(comm_)));
}

int NcclComm::query(const char* what) {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return NcclLibrary::kSuccess;
  int state = NcclLibrary::kSuccess;
  check(nccl_.comm_get_async_error(comm_, &state), "ncclCommGetAsyncError");
  if (state != NcclLibrary::kRemoteError) check(state, what);
  return state;
}

int NcclComm::state() { return query("its kernels"); }

/// Waits until NCCL has completed the call on the host.
void NcclComm::finish(const char* what, const Look& look) {
  for (int turn = 0; query(what) != NcclLibrary::kSuccess; ++turn) {
    look();
    if (turn > kSpins) std::this_thread::sleep_for(kNap);
  }
  if (!is_open()) throw Error(kAborted);
}

bool NcclComm::finalize(double patience_s) noexcept {
  try {
    const device::CurrentDevice current(*device_);
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return true;
    const auto until = Clock::now() + std::chrono::duration<double>(patience_s);
    int state = nccl_.comm_finalize(comm_);
    while (state == NcclLibrary::kInProgress && Clock::now() < until) {
      std::this_thread::sleep_for(kNap);
      if (nccl_.comm_get_async_error(comm_, &state) != NcclLibrary::kSuccess) return false;
    }
    if (state != NcclLibrary::kSuccess) return false;
    nccl_.comm_destroy(std::exchange(comm_, nullptr));
    return true;
  } catch (const Error&) {  // the device is lost
    return false;
  }
}

void NcclComm::abort() noexcept {
  try {
    const device::CurrentDevice current(*device_);  // else this thread would start device 0
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr) nccl_.comm_abort(std::exchange(comm_, nullptr));
  } catch (const Error&) {  // the device is lost, and all that was on it
    const std::lock_guard lock(mutex_);
    comm_ = nullptr;
  }
}

bool NcclComm::is_open() const {
  const std::lock_guard lock(mutex_);
  return comm_ != nullptr;
}

}  // namespace zcomm::coll
