// NcclLibrary: the functions of libnccl that zcomm uses, found at run time (decision D9).
//
// The build needs nothing of NCCL: the declarations below are NCCL's C ABI since 2.14, which later versions keep. The
// library is never unloaded. Thread rule: free-threaded once loaded. Source: NCCL user guide, "NCCL API".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "zcomm/dtype.hpp"

namespace zcomm::coll {

struct NcclCommHandle;  // ncclComm_t points to one

/// ncclUniqueId: passed by value.
struct NcclId {
  std::array<char, 128> bytes;
};

/// ncclConfig_t in 2.14; later versions know its size and fill in the rest.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 2 * 10000 + 14 * 100;
  int blocking = 0;
};

struct NcclLibrary {
  static constexpr int kSuccess = 0, kRemoteError = 6, kInProgress = 7;  // ncclResult_t
  using Comm = NcclCommHandle*;
  using Stream = void*;  // cudaStream_t

  int (*get_version)(int* version);
  int (*get_unique_id)(NcclId* id);
  int (*comm_init_rank_config)(Comm* comm, int ranks, NcclId id, int rank, NcclConfig* config);
  int (*comm_split)(Comm comm, int color, int key, Comm* made, NcclConfig* config);  ///< null before 2.18
  int (*comm_abort)(Comm comm);
  int (*comm_finalize)(Comm comm);
  int (*comm_destroy)(Comm comm);
  int (*comm_get_async_error)(Comm comm, int* error);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(Comm comm);
  int (*all_reduce)(const void* in, void* out, std::size_t count, int dtype, int op, Comm comm, Stream stream);
  int (*reduce)(const void* in, void* out, std::size_t count, int dtype, int op, int root, Comm comm, Stream stream);
  int (*reduce_scatter)(const void* in, void* out, std::size_t count, int dtype, int op, Comm comm, Stream stream);
  int (*all_gather)(const void* in, void* out, std::size_t count, int dtype, Comm comm, Stream stream);
  int (*broadcast)(const void* in, void* out, std::size_t count, int dtype, int root, Comm comm, Stream stream);
  int (*send)(const void* in, std::size_t count, int dtype, int peer, Comm comm, Stream stream);
  int (*recv)(void* out, std::size_t count, int dtype, int peer, Comm comm, Stream stream);
  int (*group_start)();
  int (*group_end)();

  /// Loads ZCOMM_NCCL_LIB, or else `path` if it is not empty, or else libnccl.so.2 as the loader finds it; the first
  /// call decides. Throws Unsupported naming the libraries tried.
  static const NcclLibrary& load(const std::string& path);

  /// "2.27.3".
  std::string version() const;
};

/// ncclDataType_t; bool travels as uint8.
int nccl_dtype(DType dtype);
/// ncclRedOp_t; of bool, sum and max are or, prod and min are and.
int nccl_op(ReduceOp op, DType dtype);

}  // namespace zcomm::coll
