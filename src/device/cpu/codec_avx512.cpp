// Codecs for AVX-512; see [Note: one definition] in kernels_table.hpp.
#define ZC_ISA avx512
#define ZC_ISA_LEVEL 2
#include "device/cpu/codec_body.hpp"
