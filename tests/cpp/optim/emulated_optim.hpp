// A StreamKernels with tasks that run the CUDA kernels of src/optim/cuda/*.cu over cuda_emulation, on host memory, at
// once.
#pragma once

#include <span>

#include "optim/stream_optim.hpp"

#define cuda emulated
#include "optim/cuda/kernels.hpp"
#undef cuda
