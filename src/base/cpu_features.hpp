// CPU features, read once at run time; ZCOMM_ISA=plain|avx2|avx512|avx512_bf16 lowers the choice (tests, debugging).
#pragma once

#include <string_view>

namespace zcomm {

// plain: baseline C++ of the target (SSE2, NEON); avx512: F, BW, VL, DQ; avx512_bf16: and BF16, VBMI (Zen 4, Sapphire
// Rapids and later).
enum class Isa { plain, avx2, avx512, avx512_bf16 };

Isa best_isa();     ///< supported by CPU and operating system
Isa current_isa();  ///< best_isa(), or ZCOMM_ISA if that is lower
std::string_view name_of(Isa isa);

}  // namespace zcomm
