// Codecs for AVX2 and F16C; see [Note: one definition] in kernels_table.hpp.
#define ZC_ISA avx2
#define ZC_ISA_LEVEL 1
#include "device/cpu/codec_body.hpp"
