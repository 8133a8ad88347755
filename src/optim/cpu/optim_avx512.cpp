// Optimizer kernels for AVX-512 F, BW, VL, DQ; see [Note: one definition] in device/cpu/kernels_table.hpp.
#define ZC_ISA avx512
#define ZC_ISA_LEVEL 2
#include "optim/cpu/optim_body.hpp"
