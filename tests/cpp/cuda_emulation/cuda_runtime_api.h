// Replaces CUDA's header of this name when kernels are compiled for the host: see cuda_runtime.h.
#pragma once

#include "cuda_emulation/cuda_runtime.h"
