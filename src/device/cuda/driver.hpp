// Driver: functions of libcuda itself, found at run time, because the library must load on machines without a driver.
//
// The CUDA runtime has no equivalent of them; results are CUresult, with the runtime's numbers. Only the *.cu include
// this. Thread rule: free-threaded. Source: CUDA Driver API, "Primary Context Management", "Context Management",
// "Memory Management".
#pragma once

#include <cstddef>

namespace zcomm::device::cuda {

struct Driver {
  using Context = void*;  // CUcontext

  int (*init)(unsigned flags);
  int (*device_get)(int* device, int ordinal);
  int (*retain_primary)(Context* context, int device);
  int (*push)(Context context);
  int (*pop)(Context* context);
  int (*address_range)(unsigned long long* base, std::size_t* nbytes, unsigned long long address);

  /// Throws CudaError naming the missing library or function.
  static const Driver& load();

 private:
  Driver();
};

}  // namespace zcomm::device::cuda
