// lion_step: checks its parameters and computes a step's factors once, in f64.
#include "zcomm/lion.hpp"

#include "optim/shard.hpp"

namespace zcomm {
namespace {

constexpr int kArrays = 1;  // m

optim::LionFactors factors_of(const LionParams& p) {
  return {.grad_scale = optim::signed_scale(p.grad_scale, p.maximize),
          .decay = static_cast<float>(1.0 - p.lr * p.weight_decay),
          .beta1 = static_cast<float>(p.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - p.beta1),
          .beta2 = static_cast<float>(p.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - p.beta2),
          .lr = static_cast<float>(p.lr)};
}

}  // namespace

std::size_t lion_state_nbytes(DType weight, std::size_t count) {
  return count * optim::state_bytes_per_element("lion", weight, kArrays);
}

void lion_step(const OptimShard& shard, const LionParams& params, int threads, ExactSum* squares) {
  optim::check_step("lion", shard, kArrays);
  optim::check_beta("lion", params.beta1);
  optim::check_beta("lion", params.beta2);
  optim::run_step(shard, kArrays, threads, optim::current_optim_table().lion, factors_of(params), squares);
}

}  // namespace zcomm
