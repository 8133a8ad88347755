// Stands in for CUDA's header of this name where kernels are compiled for the host: see cuda_runtime.h.
#pragma once

#include "cuda_emulation/cuda_runtime.h"
