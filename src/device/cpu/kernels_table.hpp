// KernelTable: the element kernels of one instruction set, behind plain function pointers.
//
// [Note: one definition] kernels_<isa>.cpp and optim_<isa>.cpp are built with flags that not every CPU supports. An
// inline function or template with external linkage that such a file emits (std::span, std::max, size_of) could be the
// copy that the linker keeps for the whole program, and then crash a CPU without that instruction set. So these files
// keep everything in unnamed namespaces, use no library templates, and take raw pointers, for which the structs below
// exist. Arguments are checked by the dispatcher (device/kernels.cpp), not here.
#pragma once

#include <cstddef>

#include "base/cpu_features.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm::device {

/// Reduce in plain C: see device/kernels.hpp. streaming: non-temporal stores; no dst aliases a src, no accumulate.
struct ReduceCall {
  void* const* dst;
  std::size_t dst_count;
  const void* const* src;
  std::size_t src_count;
  std::size_t count;
  DType in, out;
  ReduceOp op;
  bool accumulate;
  bool streaming;
};

struct KernelTable {
  void (*reduce)(const ReduceCall& call);
  void (*cast)(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count);
  void (*stream)(void* dst, const void* src, std::size_t nbytes);  ///< memcpy with non-temporal stores
};

/// Throws Unsupported if the CPU lacks it. Results of all tables are bitwise equal (except NaN payloads of sums).
const KernelTable& kernel_table(Isa isa);

}  // namespace zcomm::device
