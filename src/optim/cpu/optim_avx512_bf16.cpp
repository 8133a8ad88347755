// Optimizer kernels for AVX-512 with BF16 and VBMI; see [Note: one definition] in device/cpu/kernels_table.hpp.
#define ZC_ISA avx512_bf16
#define ZC_ISA_LEVEL 3
#include "optim/cpu/optim_body.hpp"
