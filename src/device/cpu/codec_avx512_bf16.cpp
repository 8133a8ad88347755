// Codecs for AVX-512 with BF16; see [Note: one definition] in kernels_table.hpp.
#define ZC_ISA avx512_bf16
#define ZC_ISA_LEVEL 3
#include "device/cpu/codec_body.hpp"
