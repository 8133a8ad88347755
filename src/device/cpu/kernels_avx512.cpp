// Element kernels for AVX-512 F, BW, VL, DQ; see [Note: one definition] in kernels_table.hpp.
#define ZC_ISA avx512
#define ZC_ISA_LEVEL 2
#include "device/cpu/kernels_body.hpp"
