// Optimizer kernels for the target's baseline (SSE2, NEON); see [Note: one definition] in device/kernels_table.hpp.
#define ZC_ISA plain
#define ZC_ISA_LEVEL 0
#include "optim/optim_body.hpp"
