// Optimizer kernels for the target's baseline (SSE2, NEON); see [Note: one definition] in device/cpu/kernels_table.hpp.
#define ZC_ISA plain
#define ZC_ISA_LEVEL 0
#include "optim/cpu/optim_body.hpp"
