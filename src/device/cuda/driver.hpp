// Driver: functions of libcuda itself, found at run time, as the library must load where there is no driver.
//
// They are those that the CUDA runtime has no words for; results are CUresult, with the runtime's numbers.
// Only the *.cu include this. Thread rule: free-threaded. Source: CUDA Driver API, "Primary Context Management",
// "Context Management", "Memory Management".
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

  /// Throws CudaError naming what is not there.
  static const Driver& load();

 private:
  Driver();
};

}  // namespace zcomm::device::cuda
