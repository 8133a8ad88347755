#include "base/cpu_features.hpp"

#include "base/env.hpp"

namespace zcomm {

Isa best_isa() {
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks the operating system (XGETBV).
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return Isa::plain;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return Isa::avx2;
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") ? Isa::avx512_bf16 : Isa::avx512;
#else
  return Isa::plain;
#endif
}

Isa current_isa() {
  static const Isa chosen = [] {
    const Isa best = best_isa();
    const auto asked = read_env().isa;
    if (!asked) return best;
    for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512, Isa::avx512_bf16})
      if (*asked == name_of(isa) && isa < best) return isa;
    return best;
  }();
  return chosen;
}

std::string_view name_of(Isa isa) {
  constexpr std::string_view names[] = {"plain", "avx2", "avx512", "avx512_bf16"};
  return names[static_cast<int>(isa)];
}

}  // namespace zcomm
