// Element kernels for the target's baseline (SSE2, NEON); see [Note: one definition] in kernels_table.hpp.
#define ZC_ISA plain
#define ZC_ISA_LEVEL 0
#include "device/cpu/kernels_body.hpp"
