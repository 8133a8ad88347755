// lion_step: checks its parameters and computes a step's factors once, in f64.
#include "zcomm/lion.hpp"

#include "optim/kinds.hpp"

namespace zcomm {
namespace optim {

void Kind<LionParams>::check(const LionParams& p) {
  check_beta(kName, p.beta1);
  check_beta(kName, p.beta2);
}

LionFactors Kind<LionParams>::factors(const LionParams& p) {
  return {.grad_scale = signed_scale(p.grad_scale, p.maximize),
          .decay = static_cast<float>(1.0 - p.lr * p.weight_decay),
          .beta1 = static_cast<float>(p.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - p.beta1),
          .beta2 = static_cast<float>(p.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - p.beta2),
          .lr = static_cast<float>(p.lr)};
}

}  // namespace optim

std::size_t lion_state_nbytes(DType weight, std::size_t count) {
  return count * optim::state_bytes_per_element("lion", weight, 1);
}

void lion_step(const OptimShard& shard, const LionParams& params, int threads, ExactSum* squares) {
  optim::step_shard(shard, params, threads, squares);
}

}  // namespace zcomm
