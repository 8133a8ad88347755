// Optimizer kernels for AVX2 and F16C; see [Note: one definition] in device/cpu/kernels_table.hpp.
#define ZC_ISA avx2
#define ZC_ISA_LEVEL 1
#include "optim/cpu/optim_body.hpp"
