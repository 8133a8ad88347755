// adagrad_step: checks its parameters and computes a step's factors once, in f64.
#include "zcomm/adagrad.hpp"

#include "base/error.hpp"
#include "optim/kinds.hpp"

namespace zcomm {
namespace optim {

void Kind<AdagradParams>::check(const AdagradParams& p) {
  if (p.step < 1) throw InvalidArgument(text("adagrad: step ", p.step, " is less than 1; steps count from 1"));
}

AdagradFactors Kind<AdagradParams>::factors(const AdagradParams& p) {
  return {.grad_scale = signed_scale(p.grad_scale, p.maximize),
          .l2 = static_cast<float>(p.weight_decay),
          .eps = static_cast<float>(p.eps),
          .rate = static_cast<float>(p.lr / (1.0 + static_cast<double>(p.step - 1) * p.lr_decay))};
}

}  // namespace optim

std::size_t adagrad_state_nbytes(DType weight, std::size_t count) {
  return count * optim::state_bytes_per_element("adagrad", weight, 1);
}

void adagrad_step(const OptimShard& shard, const AdagradParams& params, int threads, ExactSum* squares) {
  optim::step_shard(shard, params, threads, squares);
}

}  // namespace zcomm
