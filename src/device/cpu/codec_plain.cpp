// Codecs for plain C++; see [Note: one definition] in kernels_table.hpp.
#define ZC_ISA plain
#define ZC_ISA_LEVEL 0
#include "device/cpu/codec_body.hpp"
