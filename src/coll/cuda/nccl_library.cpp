// Loading libnccl (coll/cuda/nccl_library.hpp).
#include "coll/cuda/nccl_library.hpp"

#include <dlfcn.h>

#include <memory>
#include <mutex>

#include "base/env.hpp"
#include "base/error.hpp"

namespace zcomm::coll {
namespace {

template <class Function>
void find(void* library, Function& function, const char* name, const std::string& path) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) throw Unsupported(text("NCCL: ", path, " has no ", name, "; version 2.14 or later is needed"));
  function = reinterpret_cast<Function>(symbol);
}

NcclLibrary open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw Unsupported(
        text("NCCL: ", dlerror(),
             "; install the nvidia-nccl wheel of this CUDA version, or set ZCOMM_NCCL_LIB to libnccl.so.2"));
  NcclLibrary nccl{};
  find(library, nccl.get_version, "ncclGetVersion", path);
  find(library, nccl.get_unique_id, "ncclGetUniqueId", path);
  find(library, nccl.comm_init_rank_config, "ncclCommInitRankConfig", path);
  nccl.comm_split = reinterpret_cast<decltype(nccl.comm_split)>(dlsym(library, "ncclCommSplit"));
  find(library, nccl.comm_abort, "ncclCommAbort", path);
  find(library, nccl.comm_finalize, "ncclCommFinalize", path);
  find(library, nccl.comm_destroy, "ncclCommDestroy", path);
  find(library, nccl.comm_get_async_error, "ncclCommGetAsyncError", path);
  find(library, nccl.get_error_string, "ncclGetErrorString", path);
  find(library, nccl.get_last_error, "ncclGetLastError", path);
  find(library, nccl.all_reduce, "ncclAllReduce", path);
  find(library, nccl.reduce, "ncclReduce", path);
  find(library, nccl.reduce_scatter, "ncclReduceScatter", path);
  find(library, nccl.all_gather, "ncclAllGather", path);
  find(library, nccl.broadcast, "ncclBroadcast", path);
  find(library, nccl.send, "ncclSend", path);
  find(library, nccl.recv, "ncclRecv", path);
  find(library, nccl.group_start, "ncclGroupStart", path);
  find(library, nccl.group_end, "ncclGroupEnd", path);
  return nccl;
}

}  // namespace

const NcclLibrary& NcclLibrary::load(const std::string& path) {
  // Not a static that throws: a thread that waits for one while another leaves it by an exception may never wake under
  // the thread sanitizer.
  static std::mutex mutex;
  static std::unique_ptr<const NcclLibrary> library;
  const std::lock_guard lock(mutex);
  if (!library)
    library = std::make_unique<NcclLibrary>(open(read_env().nccl_lib.value_or(path.empty() ? "libnccl.so.2" : path)));
  return *library;
}

std::string NcclLibrary::version() const {
  int code = 0;
  get_version(&code);
  return text(code / 10000, '.', code % 10000 / 100, '.', code % 100);
}

int nccl_dtype(DType dtype) {
  switch (dtype) {
    case DType::int8:
      return 0;
    case DType::uint8:
    case DType::boolean:
      return 1;
    case DType::int32:
      return 2;
    case DType::int64:
      return 4;
    case DType::float16:
      return 6;
    case DType::float32:
      return 7;
    case DType::float64:
      return 8;
    case DType::bfloat16:
      return 9;
  }
  return -1;
}

int nccl_op(ReduceOp op, DType dtype) {
  constexpr int sum = 0, prod = 1, max = 2, min = 3, avg = 4;
  const bool is_bool = dtype == DType::boolean;
  switch (op) {
    case ReduceOp::sum:
      return is_bool ? max : sum;
    case ReduceOp::prod:
      return is_bool ? min : prod;
    case ReduceOp::max:
      return max;
    case ReduceOp::min:
      return min;
    case ReduceOp::avg:
      return avg;
  }
  return -1;
}

}  // namespace zcomm::coll
