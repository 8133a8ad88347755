// Chooses the optimizer kernels for this CPU.
#include "optim/optim_table.hpp"

#include "base/error.hpp"

namespace zcomm::optim {

namespace plain {
extern const OptimTable kOptim;
}
#if defined(__x86_64__)  // cmake drops the other files elsewhere
namespace avx2 {
extern const OptimTable kOptim;
}
namespace avx512 {
extern const OptimTable kOptim;
}
namespace avx512_bf16 {
extern const OptimTable kOptim;
}
#endif

const OptimTable& optim_table(Isa isa) {
  if (isa > best_isa())
    throw Unsupported(text("this CPU has no ", name_of(isa), "; its best is ", name_of(best_isa())));
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2:
      return avx2::kOptim;
    case Isa::avx512:
      return avx512::kOptim;
    case Isa::avx512_bf16:
      return avx512_bf16::kOptim;
#endif
    default:
      return plain::kOptim;
  }
}

const OptimTable& current_optim_table() {
  static const OptimTable& table = optim_table(current_isa());
  return table;
}

}  // namespace zcomm::optim
