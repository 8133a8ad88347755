// sgd_step: checks its parameters and computes a step's factors once, in f64.
#include "zcomm/sgd.hpp"

#include "base/error.hpp"
#include "optim/kinds.hpp"

namespace zcomm {
namespace optim {

void Kind<SgdParams>::check(const SgdParams& p) {
  if (p.momentum != 0.0 && !p.buffer)
    throw InvalidArgument(text("sgd: momentum ", p.momentum, " needs a state with a momentum buffer"));
}

SgdFactors Kind<SgdParams>::factors(const SgdParams& p) {
  // The first step is 0 * zero buffer + 1 * gradient; Nesterov looks ahead by the true momentum even then.
  return {.grad_scale = signed_scale(p.grad_scale, p.maximize),
          .l2 = static_cast<float>(p.weight_decay),
          .keep = p.first ? 0.0f : static_cast<float>(p.momentum),
          .gain = p.first ? 1.0f : static_cast<float>(1.0 - p.dampening),
          .look_ahead = static_cast<float>(p.momentum),
          .lr = static_cast<float>(p.lr),
          .momentum = p.momentum != 0.0,
          .nesterov = p.nesterov};
}

}  // namespace optim

std::size_t sgd_state_nbytes(DType weight, bool buffer, std::size_t count) {
  return count * optim::state_bytes_per_element("sgd", weight, buffer ? 1 : 0);
}

void sgd_step(const OptimShard& shard, const SgdParams& params, int threads, ExactSum* squares) {
  optim::step_shard(shard, params, threads, squares);
}

}  // namespace zcomm
