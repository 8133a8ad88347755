// Element kernels for AVX2 and F16C; see [Note: one definition] in kernels_table.hpp.
#define ZC_ISA avx2
#define ZC_ISA_LEVEL 1
#include "device/cpu/kernels_body.hpp"
